// Everything that workers and strangers may say to the leader, in any order: joins, words of runs, silence.
//
// An input is a list of events. Most are messages as they come from the wire; some are what an honest worker
// would say next, so that mutations get deep into a run.
#include <cmath>
#include <deque>
#include <map>
#include <variant>

#include "server/pool/leader.h"
#include "server/pool/run_plan.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/good_plans.h"

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
    v1::LeaderMessage prepare;  // the newest
  };

  static Leader::Options Options() {
    Leader::Options options;
    options.build = "b";
    options.model = GoodOffer("", 1).model();
    options.model.set_weights_hash(0);
    options.kv = KvShapeOf(SmallModel());
    options.vocab = SmallModel().vocab;
    return options;
  }

  void Do(FuzzInput& input) {
    const uint8_t what = input.Byte();
    Line& line = lines_[input.Byte() % kConnections];
    switch (what % 8) {
      case 0:
        if (line.connection != 0) leader_.OnDisconnected(line.connection, now_);
        line = {.connection = ++last_connection_, .prepare = {}};
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
        return SayPrepared(line);
      case 6:
        return SayDone(line, input.Byte());
      case 7: {
        v1::WorkerMessage message;
        if (!message.ParseFromString(input.Piece())) return;
        return leader_.OnMessage(line.connection, message, now_);
      }
    }
  }

  void SayPrepared(const Line& line) {
    const v1::Prepare& prepare = line.prepare.prepare();
    const auto plan = FromRunPlan(prepare.plan());
    if (!plan.ok()) return;  // nothing was prepared
    std::vector<std::vector<uint32_t>> shards;
    v1::WorkerMessage message;
    message.set_epoch(line.prepare.epoch());
    message.mutable_prepared()->set_run(prepare.run());
    for (uint32_t seat = prepare.first_rank(); seat < prepare.first_rank() + prepare.ranks(); ++seat) {
      const int rank = plan->RankAt(static_cast<int>(seat));
      shards.emplace_back(plan->layout.ChunkTokens(rank), 1);
      message.mutable_prepared()->add_addresses("a");
    }
    message.mutable_prepared()->set_hash(RunHash(*plan, static_cast<int>(prepare.first_rank()), shards));
    leader_.OnMessage(line.connection, message, now_);
  }

  void SayDone(const Line& line, uint32_t rank) {
    v1::WorkerMessage message;
    message.set_epoch(line.prepare.epoch());
    message.mutable_rank_done()->set_run(line.prepare.prepare().run());
    message.mutable_rank_done()->set_rank(rank % 8);
    for (int64_t i = 0; i < SmallModel().vocab; ++i) message.mutable_rank_done()->add_logits(0);
    leader_.OnMessage(line.connection, message, now_);
  }

  void TakeActions() {
    for (Leader::Action& action : leader_.TakeActions()) {
      if (auto* send = std::get_if<Leader::Send>(&action); send != nullptr && send->message.has_prepare()) {
        for (Line& line : lines_) {
          if (line.connection == send->to) line.prepare = send->message;
        }
      } else if (auto* answer = std::get_if<Leader::Answer>(&action)) {
        FUZZ_CHECK(answered_[answer->ticket]++ == 0);  // once
        if (answer->result.ok()) FUZZ_CHECK(std::ssize(answer->result->logits) == SmallModel().vocab);
      } else if (auto* done = std::get_if<Leader::LayersDone>(&action)) {
        FUZZ_CHECK(done->layers > 0 && done->layers <= SmallModel().layers);
      } else if (auto* log = std::get_if<Leader::LogLine>(&action)) {
        FUZZ_CHECK(log->text.find('\n') == std::string::npos);
      }
    }
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
  const std::string all_prepared = Event(5, 0) + Event(5, 1);
  const auto rank_done = [](int line, char rank) { return Event(6, line) + rank; };
  return {
      two + submit + all_prepared + Say(0, progress) + rank_done(0, 0) + rank_done(1, 1) + rank_done(1, 2),
      two + submit + all_prepared + Say(1, done) + Say(0, stopped) + Say(1, stopped) + tick + all_prepared,
      two + submit + Say(0, prepared) + tick + Say(1, leave) + tick,
      two + submit + all_prepared + Event(4, 0) + '\0' + Say(0, stopped) + Event(1, 1) + tick,
      submit + JoinAs(0, "a", 64) + JoinAs(1, "a", 1) + tick + Event(5, 0) + tick + tick,
  };
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  meshfill::FuzzInput input(data, size);
  meshfill::Pool().Run(input);
  return 0;
}
