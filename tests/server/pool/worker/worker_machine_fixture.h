// What tests of the worker's machine share: its events in virtual time, and what it wants, by kind.
#ifndef MESHFILL_TESTS_SERVER_POOL_WORKER_WORKER_MACHINE_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_POOL_WORKER_WORKER_MACHINE_FIXTURE_H_

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/plan/planner.h"
#include "server/pool/run_plan.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill {

class WorkerMachineFixture : public testing::Test {
 protected:
  static constexpr int kRanks = 2;  // of the worker, of four of the plan
  static constexpr int kFirstRank = 1;
  static constexpr int64_t kTokens = 300;
  static constexpr uint64_t kMemory = 1000;
  static constexpr uint64_t kEpoch = 7;

  explicit WorkerMachineFixture(const WorkerMachine::Options& options = Options())
      : machine_(options, [this] { return progress_; }), plan_(MakeTestPlan()) {
    machine_.Start(now_);
  }

  static WorkerMachine::Options Options() {
    WorkerMachine::Options options;
    options.offer.set_name("w");
    options.offer.set_ranks(kRanks);
    options.offer.set_memory_bytes(kMemory);
    return options;
  }
  static Plan MakeTestPlan() {
    const ModelShape shape = {.layers = 2,
                              .hidden = 64,
                              .intermediate = 64,
                              .q_heads = 4,
                              .kv_heads = 2,
                              .head_dim = 16,
                              .vocab = 100,
                              .context_tokens = 4096};
    return MakePlan(shape, PoolSpeed{}, {.tokens = kTokens, .ranks = 4, .tile = Tile{2, 2}}).value().plan;
  }

  // Does what the machine wants: keeps it, by kind.
  void Do() {
    for (WorkerMachine::Action& action : machine_.TakeActions()) {
      if (auto* connect = std::get_if<WorkerMachine::Connect>(&action)) {
        connection_ = connect->connection;
        ++connects_;
      } else if (auto* send = std::get_if<WorkerMachine::Send>(&action)) {
        sent_.push_back(std::move(send->message));
      } else if (std::get_if<WorkerMachine::Disconnect>(&action) != nullptr) {
        ++disconnects_;
      } else if (auto* prepare = std::get_if<WorkerMachine::PrepareRun>(&action)) {
        prepared_.push_back(std::move(prepare->part));
      } else if (auto* start = std::get_if<WorkerMachine::StartRun>(&action)) {
        started_.push_back(std::move(*start));
      } else if (auto* pause = std::get_if<WorkerMachine::PauseRun>(&action)) {
        turns_.emplace_back(pause->run, false);
        pauses_.push_back(pause->number);
      } else if (auto* pause_at = std::get_if<WorkerMachine::PauseRunAt>(&action)) {
        paused_at_.push_back(
            absl::StrCat("run ", pause_at->run, ", pause ", pause_at->number, ", at ", pause_at->messages));
      } else if (auto* resume = std::get_if<WorkerMachine::ResumeRun>(&action)) {
        turns_.emplace_back(resume->run, true);
      } else if (auto* stop = std::get_if<WorkerMachine::StopRun>(&action)) {
        stopped_.push_back(stop->run);
      } else if (auto* release = std::get_if<WorkerMachine::ReleaseRun>(&action)) {
        released_.push_back(release->run);
      } else if (auto* lasts = std::get_if<WorkerMachine::KvLasts>(&action)) {
        kv_.push_back(absl::StrCat(lasts->lease, " lasts ", absl::FormatDuration(lasts->lasts)));
      } else if (auto* ends = std::get_if<WorkerMachine::KvEnds>(&action)) {
        kv_.push_back(absl::StrCat(ends->lease, " ends"));
      } else if (auto* run_ends = std::get_if<WorkerMachine::KvRunEnds>(&action)) {
        kv_.push_back(absl::StrCat("run ", run_ends->run, " ends"));
      } else if (std::get_if<WorkerMachine::AllKvEnds>(&action) != nullptr) {
        kv_.emplace_back("all ends");
      } else if (std::get_if<WorkerMachine::ForgetSpeed>(&action) != nullptr) {
        ++speeds_forgotten_;
      } else if (auto* exit = std::get_if<WorkerMachine::Exit>(&action)) {
        exit_ = exit->status;
      } else if (auto* line = std::get_if<WorkerMachine::LogLine>(&action)) {
        lines_.push_back(std::move(line->text));
      }
    }
  }
  void Tick(absl::Duration passes = absl::ZeroDuration()) {
    now_ += passes;
    machine_.OnTick(now_);
    Do();
  }
  template <typename Fill>
  void Hear(Fill fill) {
    v1::LeaderMessage message;
    message.set_epoch(kEpoch);
    fill(message);
    machine_.OnMessage(connection_, message, now_);
    Do();
  }
  void HearWelcome() {
    Hear([](v1::LeaderMessage& message) { message.mutable_welcome(); });
  }
  void HearRefused(bool retry) {
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_refused()->set_reason("no");
      message.mutable_refused()->set_retry(retry);
    });
  }
  // The time until it connects again.
  absl::Duration Reconnect() {
    const absl::Time begin = now_;
    for (const int before = connects_; connects_ == before && now_ < begin + absl::Minutes(1);) {
      Tick(absl::Milliseconds(50));
    }
    return now_ - begin;
  }
  void Join() {
    Tick();
    HearWelcome();
    ASSERT_TRUE(machine_.member());
    sent_.clear();
    kv_.clear();
  }
  void HearPrepare(uint64_t run, uint64_t reserve_bytes = 100, const std::string& lease = "",
                   bool cache = false) {
    Hear([&](v1::LeaderMessage& message) {
      v1::Prepare& prepare = *message.mutable_prepare();
      prepare.set_run(run);
      *prepare.mutable_plan() = ToRunPlan(plan_);
      prepare.set_first_rank(kFirstRank);
      prepare.set_ranks(kRanks);
      prepare.set_reserve_bytes(reserve_bytes);
      if (!lease.empty()) prepare.mutable_keep_kv()->set_lease(lease);
      if (cache) prepare.mutable_keep_kv()->set_cache(true);
    });
  }
  // The tokens of one seat, in two messages.
  void HearShard(uint64_t run, int seat) {
    const int64_t tokens = plan_.layout.ChunkTokens(plan_.RankAt(seat));
    for (const int64_t begin : {0, 10}) {
      const int64_t end = begin == 0 ? 10 : tokens;
      Hear([&](v1::LeaderMessage& message) {
        v1::Shard& shard = *message.mutable_shard();
        shard.set_run(run);
        shard.set_rank(static_cast<uint32_t>(seat));
        shard.set_begin(static_cast<uint64_t>(begin));
        for (int64_t id = begin; id < end; ++id) shard.add_ids(static_cast<uint32_t>(id % 90));
      });
    }
  }
  void HearRun(uint64_t run) {
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_run()->set_run(run);
      for (const char* address : {"a", "b", "c", "d"}) message.mutable_run()->add_addresses(address);
    });
  }
  void HearCancel(uint64_t run) {
    Hear([&](v1::LeaderMessage& message) { message.mutable_cancel()->set_run(run); });
  }
  // From Prepare until the ranks compute.
  void BeginRun(uint64_t run) {
    HearPrepare(run);
    for (int seat = kFirstRank; seat < kFirstRank + kRanks; ++seat) HearShard(run, seat);
    machine_.OnRunPrepared(run, std::vector<std::string>{"b", "c"});
    HearRun(run);
    ASSERT_FALSE(started_.empty());
    ASSERT_EQ(started_.back().run, run);
    sent_.clear();
  }
  std::vector<uint64_t> ConfirmedStops() const {
    std::vector<uint64_t> runs;
    for (const v1::WorkerMessage& message : sent_) {
      if (message.has_stopped()) runs.push_back(message.stopped().run());
    }
    return runs;
  }

  absl::Time now_ = absl::UnixEpoch();
  WorkerMachine::ProgressOfRuns progress_;  // what the host's ranks are at
  WorkerMachine machine_;
  const Plan plan_;
  WorkerMachine::Connection connection_ = 0;
  int connects_ = 0;
  int disconnects_ = 0;
  int speeds_forgotten_ = 0;
  std::vector<v1::WorkerMessage> sent_;
  std::vector<WorkerMachine::RunPart> prepared_;
  std::vector<WorkerMachine::StartRun> started_;
  std::vector<uint64_t> stopped_, released_;
  std::vector<uint64_t> pauses_;                  // numbers of those
  std::vector<std::string> paused_at_;            // in words
  std::vector<std::pair<uint64_t, bool>> turns_;  // runs that stood still (false) or went on
  std::vector<std::string> kv_;                   // what ends or lasts of K and V
  std::optional<absl::Status> exit_;
  std::vector<std::string> lines_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_WORKER_WORKER_MACHINE_FIXTURE_H_
