// Everything that a leader may say to a worker, in any order, with a host that does what it is told.
#include <set>
#include <variant>

#include "server/pool/run_plan.h"
#include "server/pool/worker/worker_machine.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/good_plans.h"
#include "tests/fuzz/quiet_protobuf.h"

namespace meshfill {
namespace {

constexpr uint32_t kRanks = 2;
constexpr int kMostEvents = 300;

class Worker {
 public:
  Worker() : machine_({.offer = GoodOffer("w", kRanks)}, [] { return WorkerMachine::ProgressOfRuns(); }) {
    machine_.Start(now_);
  }

  void Run(FuzzInput& input) {
    for (int event = 0; event < kMostEvents && !input.empty(); ++event) {
      Do(input);
      TakeActions();
      FUZZ_CHECK(machine_.reserved_bytes() >= 0 && machine_.reserved_bytes() <= int64_t{1} << 30);
    }
  }

 private:
  void Do(FuzzInput& input) {
    switch (input.Byte() % 6) {
      case 0:
        now_ += absl::Milliseconds(input.Byte() * 20);
        return machine_.OnTick(now_);
      case 1:
        return machine_.OnDisconnected(connection_, absl::UnavailableError("gone"), now_);
      case 2:
        return machine_.Drain(now_);
      case 3:  // the host has prepared
        for (const auto& [run, ranks] : preparing_) {
          machine_.OnRunPrepared(run, std::vector<std::string>(ranks, "a"));
        }
        return preparing_.clear();
      case 4:  // the host stands still
        for (const uint64_t run : stopping_) machine_.OnRunStopped(run, now_);
        return stopping_.clear();
      case 5: {
        v1::LeaderMessage message;
        if (!message.ParseFromString(input.Piece())) return;
        return machine_.OnMessage(connection_, message, now_);
      }
    }
  }

  void TakeActions() {
    for (WorkerMachine::Action& action : machine_.TakeActions()) {
      if (auto* connect = std::get_if<WorkerMachine::Connect>(&action)) {
        connection_ = connect->connection;
        FUZZ_CHECK(preparing_.empty() && running_.empty() && stopping_.empty());  // the host stands still
      } else if (auto* prepare = std::get_if<WorkerMachine::PrepareRun>(&action)) {
        Check(prepare->part);
        preparing_.emplace(prepare->part.number, prepare->part.shards.size());
      } else if (auto* start = std::get_if<WorkerMachine::StartRun>(&action)) {
        FUZZ_CHECK(running_.insert(start->run).second);
      } else if (auto* pause = std::get_if<WorkerMachine::PauseRun>(&action)) {
        FUZZ_CHECK(running_.contains(pause->run));
      } else if (auto* resume = std::get_if<WorkerMachine::ResumeRun>(&action)) {
        FUZZ_CHECK(running_.contains(resume->run));
      } else if (auto* stop = std::get_if<WorkerMachine::StopRun>(&action)) {
        preparing_.erase(stop->run);
        running_.erase(stop->run);
        stopping_.insert(stop->run);
      } else if (auto* release = std::get_if<WorkerMachine::ReleaseRun>(&action)) {
        running_.erase(release->run);
      }
    }
  }

  // What the host may count on.
  static void Check(const WorkerMachine::RunPart& part) {
    const Plan& plan = part.plan;
    const size_t ranks = part.shards.size();
    FUZZ_CHECK(ranks >= 1 && ranks <= kRanks && part.first_rank >= 0);
    FUZZ_CHECK(part.first_rank + static_cast<int>(ranks) <= plan.ranks());
    FUZZ_CHECK(part.reserve_bytes >= 0);
    for (size_t i = 0; i < ranks; ++i) {
      const int rank = plan.RankAt(part.first_rank + static_cast<int>(i));
      FUZZ_CHECK(std::ssize(part.shards[i]) == plan.layout.ChunkTokens(rank));
    }
    int64_t prefix_tokens = 0;
    for (const HeldKv::RunTokens& run : part.prefix) {
      FUZZ_CHECK(run.tokens >= 0 && run.tokens <= plan.cached_tokens);
      prefix_tokens += run.tokens;
    }
    FUZZ_CHECK(prefix_tokens == plan.cached_tokens);
  }

  absl::Time now_ = absl::UnixEpoch();
  WorkerMachine::Connection connection_ = 0;
  std::map<uint64_t, size_t> preparing_;  // by run: its ranks here
  std::set<uint64_t> running_;            // that may be told to stand still
  std::set<uint64_t> stopping_;
  WorkerMachine machine_;
};

std::string Say(const v1::LeaderMessage& message) { return "\x05" + FuzzPiece(message.SerializeAsString()); }

// A run of two ranks, both here, or the second.
std::string GoodRun(uint64_t run, uint32_t first_rank, uint32_t ranks) {
  const Plan plan = GoodPlans()[3];
  v1::LeaderMessage message;
  message.set_epoch(1);
  v1::Prepare& prepare = *message.mutable_prepare();
  prepare.set_run(run);
  *prepare.mutable_plan() = ToRunPlan(plan);
  prepare.set_first_rank(first_rank);
  prepare.set_ranks(ranks);
  prepare.set_reserve_bytes(1 << 20);
  prepare.mutable_keep_kv()->set_lease("l");
  prepare.mutable_keep_kv()->set_lasts_seconds(30);
  std::string words = Say(message);
  for (uint32_t rank = first_rank; rank < first_rank + ranks; ++rank) {
    v1::LeaderMessage tokens;
    tokens.set_epoch(1);
    v1::Shard& shard = *tokens.mutable_shard();
    shard.set_run(run);
    shard.set_rank(rank);
    for (int64_t i = plan.layout.ChunkTokens(plan.RankAt(static_cast<int>(rank))); i > 0; --i)
      shard.add_ids(1);
    words += Say(tokens);
  }
  return words + '\x03';
}

}  // namespace

const int kFuzzRounds = 30'000;

std::vector<std::string> FuzzSeeds() {
  v1::LeaderMessage welcome, run, pause, resume, finish, cancel, abort, goodbye, lasts, prefix;
  welcome.mutable_welcome();
  run.set_epoch(1);
  run.mutable_run()->set_run(1);
  for (int rank = 0; rank < 2; ++rank) run.mutable_run()->add_addresses("a");
  for (const uint32_t peer : {1, 0}) {
    if (run.run().probes_size() == 0) run.mutable_run()->add_probes();
    run.mutable_run()->mutable_probes(0)->add_peers(peer);
  }
  pause.mutable_pause()->set_run(1);
  resume.mutable_resume()->set_run(1);
  finish.mutable_finish()->set_run(1);
  cancel.mutable_cancel()->set_run(1);
  abort.mutable_abort()->set_run(2);
  abort.mutable_abort()->set_reason("a worker is lost");
  goodbye.mutable_goodbye();
  lasts.mutable_kv_lasts()->set_lease("l");
  lasts.mutable_kv_lasts()->set_seconds(5);
  prefix.mutable_prepare()->set_run(3);
  prefix.mutable_prepare()->set_ranks(1);
  *prefix.mutable_prepare()->mutable_plan() = ToRunPlan(GoodPlans()[3]);
  prefix.mutable_prepare()->mutable_plan()->set_cached_tokens(128);
  for (const uint64_t tokens : {100, 28}) prefix.mutable_prepare()->add_prefix()->set_tokens(tokens);
  const std::string begin = std::string("\x00\x01", 2) + Say(welcome);
  return {
      begin + GoodRun(1, 0, 2) + Say(run) + Say(finish) + GoodRun(2, 1, 1) + Say(abort) + "\x04",
      begin + GoodRun(1, 0, 2) + Say(run) + Say(pause) + GoodRun(2, 0, 1) + Say(resume) + Say(finish),
      begin + GoodRun(1, 0, 2) + Say(pause) + Say(run) + Say(pause) + Say(cancel) + Say(resume) + "\x04",
      begin + GoodRun(1, 0, 2) + Say(cancel) + "\x04" + Say(lasts) + "\x02" + Say(goodbye),
      begin + Say(prefix) + GoodRun(4, 0, 1) + "\x01" + "\x04" + std::string("\x00\xff", 2),
  };
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  [[maybe_unused]] const meshfill::QuietProtobuf quiet{};
  meshfill::FuzzInput input(data, size);
  meshfill::Worker().Run(input);
  return 0;
}
