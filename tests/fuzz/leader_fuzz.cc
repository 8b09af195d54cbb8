// Everything that workers and strangers may say to the leader, in any order: joins, words of runs, silence.
// Several runs live at once, and their turns change.
//
// An input is a list of events. Most are messages as they come from the wire; some are what an honest worker
// would say next, so that mutations get deep into a run.
#include <cmath>
#include <deque>
#include <map>
#include <utility>
#include <variant>

#include "server/pool/leader.h"
#include "server/pool/run_plan.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/good_plans.h"
#include "tests/fuzz/quiet_protobuf.h"

namespace meshfill {
namespace {

constexpr int kConnections = 4;
constexpr int kMostEvents = 300;

class Pool {
 public:
  Pool()
      : leader_(Options(), [](const PoolCapacity& capacity, int64_t tokens, const PrefillOptions& options,
                              const CachedPrefix& cached) {
          return PlanForPool(SmallModel(), EngineOptions(), capacity, tokens, options, cached);
        }) {}

  void Run(FuzzInput& input) {
    for (int event = 0; event < kMostEvents && !input.empty(); ++event) {
      Do(input);
      TakeActions();
      Check();
    }
  }

 private:
  struct Line {
    Leader::Connection connection = 0;
    std::vector<v1::LeaderMessage> prepares;
  };

  static Leader::Options Options() {
    Leader::Options options;
    options.build = "b";
    options.model = GoodOffer("", 1).model();
    options.model.set_weights_hash(0);
    options.kv = KvShapeOf(SmallModel());
    options.vocab = SmallModel().vocab;
    options.runs_at_once = 3;
    return options;
  }

  void Do(FuzzInput& input) {
    const uint8_t what = input.Byte();
    Line& line = lines_[input.Byte() % kConnections];
    switch (what % 9) {
      case 0:
        if (line.connection != 0) leader_.OnDisconnected(line.connection, now_);
        line = {.connection = ++last_connection_, .prepares = {}};
        return leader_.OnConnected(line.connection, now_);
      case 1:
        leader_.OnDisconnected(line.connection, now_);
        line = {};
        return;
      case 2:
        now_ += absl::Milliseconds(input.Byte() * 20);
        return leader_.OnTick(now_);
      case 3:
        prompts_.emplace_back(1 + input.Word() % 500, 1);
        tickets_.push_back(leader_.Submit({.id = "r", .tokens = prompts_.back(), .options = {}}, now_));
        return;
      case 4:
        if (tickets_.empty()) return;
        leader_.CancelRequest(tickets_[input.Byte() % tickets_.size()], absl::CancelledError("gone"), now_);
        return;
      case 5:
        return SayPrepared(line, PrepareOf(line, input.Byte()));
      case 6: {
        const uint32_t rank = input.Byte();
        return SayDone(line, PrepareOf(line, input.Byte()), rank);
      }
      case 7: {
        v1::WorkerMessage message;
        if (!message.ParseFromString(input.Piece())) return;
        return leader_.OnMessage(line.connection, message, now_);
      }
      case 8: {
        if (tickets_.empty()) return;
        const uint8_t whose = input.Byte();
        return leader_.SetPaused(tickets_[whose / 2 % tickets_.size()], whose % 2 == 0, now_);
      }
    }
  }

  // Of the runs that the line was told, the newest first.
  static v1::LeaderMessage PrepareOf(const Line& line, size_t back) {
    if (line.prepares.empty()) return {};
    return line.prepares[line.prepares.size() - 1 - back % line.prepares.size()];
  }

  void SayPrepared(const Line& line, const v1::LeaderMessage& told) {
    const v1::Prepare& prepare = told.prepare();
    const auto plan = FromRunPlan(prepare.plan());
    if (!plan.ok()) return;  // nothing was prepared
    std::vector<std::vector<uint32_t>> shards;
    v1::WorkerMessage message;
    message.set_epoch(told.epoch());
    message.mutable_prepared()->set_run(prepare.run());
    for (uint32_t seat = prepare.first_rank(); seat < prepare.first_rank() + prepare.ranks(); ++seat) {
      const int rank = plan->RankAt(static_cast<int>(seat));
      shards.emplace_back(plan->layout.ChunkTokens(rank), 1);
      message.mutable_prepared()->add_addresses("a");
    }
    message.mutable_prepared()->set_hash(RunHash(*plan, static_cast<int>(prepare.first_rank()), shards));
    leader_.OnMessage(line.connection, message, now_);
  }

  void SayDone(const Line& line, const v1::LeaderMessage& told, uint32_t rank) {
    v1::WorkerMessage message;
    message.set_epoch(told.epoch());
    message.mutable_rank_done()->set_run(told.prepare().run());
    message.mutable_rank_done()->set_rank(rank % 8);
    for (int64_t i = 0; i < SmallModel().vocab; ++i) message.mutable_rank_done()->add_logits(0);
    leader_.OnMessage(line.connection, message, now_);
  }

  void TakeActions() {
    for (Leader::Action& action : leader_.TakeActions()) {
      if (auto* send = std::get_if<Leader::Send>(&action)) {
        CheckTurn(send->to, send->message);
        for (Line& line : lines_) {
          if (line.connection == send->to && send->message.has_prepare()) {
            line.prepares.push_back(send->message);
          }
        }
      } else if (auto* answer = std::get_if<Leader::Answer>(&action)) {
        FUZZ_CHECK(answered_[answer->ticket]++ == 0);  // once
        if (answer->result.ok()) FUZZ_CHECK(std::ssize(answer->result->logits) == SmallModel().vocab);
      } else if (auto* done = std::get_if<Leader::LayersDone>(&action)) {
        FUZZ_CHECK(done->layers > 0 && done->layers <= done->of && done->of % SmallModel().layers == 0);
      } else if (auto* log = std::get_if<Leader::LogLine>(&action)) {
        FUZZ_CHECK(log->text.find('\n') == std::string::npos);
      }
    }
  }

  // Pause and Resume come after Run, by turns.
  void CheckTurn(Leader::Connection to, const v1::LeaderMessage& message) {
    if (message.has_run()) {
      FUZZ_CHECK(paused_.emplace(std::pair(to, message.run().run()), false).second);
    }
    if (!message.has_pause() && !message.has_resume()) return;
    const uint64_t number = message.has_pause() ? message.pause().run() : message.resume().run();
    const auto run = paused_.find(std::pair(to, number));
    FUZZ_CHECK(run != paused_.end() && run->second == message.has_resume());
    run->second = message.has_pause();
  }

  // What everybody may count on, whoever has joined.
  void Check() const {
    const PoolCapacity capacity = leader_.capacity();
    FUZZ_CHECK(capacity.ranks >= 0 && capacity.ranks <= kMaxPlanRanks && capacity.rank_memory_bytes >= 0);
    FUZZ_CHECK(std::isfinite(leader_.peak_flops()) && leader_.peak_flops() >= 0);
    if (capacity.ranks > 0) FUZZ_CHECK(CheckPoolSpeed(capacity.speed).ok());
    for (const Leader::WorkerView& worker : leader_.workers()) {
      FUZZ_CHECK(worker.offer->name().size() <= 128 && worker.offer->host().size() <= 256);
    }
  }

  absl::Time now_ = absl::UnixEpoch();
  std::deque<std::vector<uint32_t>> prompts_;  // the leader reads them
  std::vector<Line> lines_ = std::vector<Line>(kConnections);
  Leader::Connection last_connection_ = 0;
  std::vector<Leader::Ticket> tickets_;
  std::map<Leader::Ticket, int> answered_;
  std::map<std::pair<Leader::Connection, uint64_t>, bool> paused_;  // runs that were told to begin
  Leader leader_;
};

std::string Event(int what, int line) { return {static_cast<char>(what), static_cast<char>(line)}; }
std::string Say(int line, const v1::WorkerMessage& message) {
  return Event(7, line) + FuzzPiece(message.SerializeAsString());
}
std::string JoinAs(int line, const std::string& name, uint32_t ranks) {
  v1::WorkerMessage message;
  *message.mutable_join() = GoodOffer(name, ranks);
  return Event(0, line) + Say(line, message);
}

}  // namespace

const int kFuzzRounds = 3'000;

std::vector<std::string> FuzzSeeds() {
  v1::WorkerMessage progress, stopped, leave, done, prepared;
  progress.set_epoch(2);
  progress.mutable_progress()->set_run(1);
  progress.mutable_progress()->add_ranks()->set_layers_done(1);
  progress.mutable_progress()->mutable_ranks(0)->set_operations(7);
  progress.mutable_progress()->mutable_ranks(0)->set_computing(true);
  stopped.set_epoch(2);
  stopped.mutable_stopped()->set_run(1);
  leave.mutable_leave();
  done.set_epoch(2);
  done.mutable_rank_done()->set_run(1);
  done.mutable_rank_done()->mutable_outcome()->set_code(14);
  done.mutable_rank_done()->mutable_outcome()->set_message("a peer is gone");
  done.mutable_rank_done()->mutable_stats()->add_wait_seconds(1);
  done.mutable_rank_done()->add_links()->set_bytes_per_second(1e9);
  prepared.set_epoch(2);
  prepared.mutable_prepared()->set_run(1);
  prepared.mutable_prepared()->mutable_outcome()->set_code(9);
  const std::string two = JoinAs(0, "a", 1) + JoinAs(1, "b", 2);
  const std::string submit = Event(3, 0) + "\xc8" + std::string(1, '\0'), tick = Event(2, 0) + "\x32";
  // Of the newest run, or of one that is older.
  const auto prepared_by = [](int line, char back) { return Event(5, line) + back; };
  const std::string all_prepared = prepared_by(0, 0) + prepared_by(1, 0);
  const auto rank_done = [](int line, char rank, char back = 0) { return Event(6, line) + rank + back; };
  const auto all_done = [&](char back) {
    return rank_done(0, 0, back) + rank_done(1, 1, back) + rank_done(1, 2, back);
  };
  const auto pause = [](int request) { return Event(8, 0) + static_cast<char>(2 * request); };
  const auto resume = [](int request) { return Event(8, 0) + static_cast<char>(2 * request + 1); };
  return {
      two + submit + all_prepared + Say(0, progress) + all_done(0),
      two + submit + all_prepared + Say(1, done) + Say(0, stopped) + Say(1, stopped) + tick + all_prepared,
      two + submit + Say(0, prepared) + tick + Say(1, leave) + tick,
      two + submit + all_prepared + Event(4, 0) + '\0' + Say(0, stopped) + Event(1, 1) + tick,
      submit + JoinAs(0, "a", 64) + JoinAs(1, "a", 1) + tick + prepared_by(0, 0) + tick + tick,
      two + submit + all_prepared + pause(0) + submit + all_prepared + all_done(0) + resume(0) + all_done(1),
      two + submit + pause(0) + all_prepared + submit + all_prepared + resume(0) + pause(1) + Event(1, 1) +
          tick,
      two + submit + all_prepared + submit + submit + pause(0) + submit + tick + Event(4, 0) + '\1' +
          resume(0),
  };
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  [[maybe_unused]] const meshfill::QuietProtobuf quiet{};
  meshfill::FuzzInput input(data, size);
  meshfill::Pool().Run(input);
  return 0;
}
