// The worker's machine, event by event, in virtual time; what it does when everything fails at once is
// pool_simulation_test's.
#include "server/pool/worker_machine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/plan/planner.h"
#include "server/pool/run_plan.h"

namespace meshfill {
namespace {

constexpr int kRanks = 2;  // of the worker, of four of the plan
constexpr int kFirstRank = 1;
constexpr int64_t kTokens = 300;
constexpr uint64_t kMemory = 1000;
constexpr uint64_t kEpoch = 7;

class WorkerMachineTest : public testing::Test {
 protected:
  WorkerMachineTest() : machine_(Options()), plan_(MakeTestPlan()) { machine_.Start(now_); }

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
      } else if (auto* resume = std::get_if<WorkerMachine::ResumeRun>(&action)) {
        turns_.emplace_back(resume->run, true);
      } else if (auto* stop = std::get_if<WorkerMachine::StopRun>(&action)) {
        stopped_.push_back(stop->run);
      } else if (auto* release = std::get_if<WorkerMachine::ReleaseRun>(&action)) {
        released_.push_back(release->run);
      } else if (auto* exit = std::get_if<WorkerMachine::Exit>(&action)) {
        exit_ = exit->status;
      }
    }
  }
  void Tick(absl::Duration passes = absl::ZeroDuration(),
            const WorkerMachine::ProgressOfRuns& progress = {}) {
    now_ += passes;
    machine_.OnTick(now_, progress);
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
  void Join() {
    Tick();
    Hear([](v1::LeaderMessage& message) { message.mutable_welcome(); });
    ASSERT_TRUE(machine_.member());
    sent_.clear();
  }
  void HearPrepare(uint64_t run, uint64_t reserve_bytes = 100, const std::string& lease = "") {
    Hear([&](v1::LeaderMessage& message) {
      v1::Prepare& prepare = *message.mutable_prepare();
      prepare.set_run(run);
      *prepare.mutable_plan() = ToRunPlan(plan_);
      prepare.set_first_rank(kFirstRank);
      prepare.set_ranks(kRanks);
      prepare.set_reserve_bytes(reserve_bytes);
      if (!lease.empty()) prepare.mutable_keep_kv()->set_lease(lease);
    });
  }
  // The tokens of one seat, in two messages.
  void HearShard(uint64_t run, int seat) {
    const int64_t tokens = plan_.layout.ChunkTokens(plan_.RankAt(seat));
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 10}, {10, tokens}}) {
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
  WorkerMachine machine_;
  const Plan plan_;
  WorkerMachine::Connection connection_ = 0;
  int connects_ = 0;
  int disconnects_ = 0;
  std::vector<v1::WorkerMessage> sent_;
  std::vector<WorkerMachine::RunPart> prepared_;
  std::vector<WorkerMachine::StartRun> started_;
  std::vector<uint64_t> stopped_, released_;
  std::vector<std::pair<uint64_t, bool>> turns_;  // runs that stood still (false) or went on
  std::optional<absl::Status> exit_;
};

TEST_F(WorkerMachineTest, JoinsWithItsOfferAndSaysThatItLives) {
  Tick();
  EXPECT_EQ(connects_, 1);
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_.front().join().name(), "w");
  EXPECT_FALSE(machine_.member());
  Hear([](v1::LeaderMessage& message) { message.mutable_welcome(); });
  EXPECT_TRUE(machine_.member());
  Tick();
  ASSERT_EQ(sent_.size(), 2u);
  EXPECT_TRUE(sent_.back().has_progress());
  EXPECT_EQ(sent_.back().epoch(), kEpoch);
  EXPECT_EQ(sent_.back().progress().run(), 0u);
  Tick(absl::Milliseconds(100));
  EXPECT_EQ(sent_.size(), 2u) << "before progress_interval";
  Tick(absl::Milliseconds(100));
  EXPECT_EQ(sent_.size(), 3u);
}

TEST_F(WorkerMachineTest, TakesARunFromPrepareToFinish) {
  Join();
  HearPrepare(5);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  EXPECT_TRUE(prepared_.empty()) << "the tokens are not there";
  HearShard(5, 1);
  EXPECT_TRUE(prepared_.empty());
  HearShard(5, 2);
  ASSERT_EQ(prepared_.size(), 1u);
  ASSERT_EQ(prepared_[0].shards.size(), 2u);
  EXPECT_EQ(prepared_[0].first_rank, kFirstRank);
  EXPECT_EQ(static_cast<int64_t>(prepared_[0].shards[1].size()),
            plan_.layout.ChunkTokens(plan_.RankAt(kFirstRank + 1)));
  EXPECT_TRUE(sent_.empty());

  machine_.OnRunPrepared(5, std::vector<std::string>{"b", "c"});
  Do();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].epoch(), kEpoch);
  EXPECT_EQ(sent_[0].prepared().addresses_size(), 2);
  EXPECT_EQ(sent_[0].prepared().hash(), RunHash(plan_, kFirstRank, prepared_[0].shards));
  EXPECT_TRUE(started_.empty());

  HearRun(5);
  ASSERT_EQ(started_.size(), 1u);
  EXPECT_EQ(started_[0].addresses, (std::vector<std::string>{"a", "b", "c", "d"}));
  sent_.clear();
  Tick(absl::Milliseconds(200),
       {{5, {{.rank = 1, .layers_done = 1, .operations = 9, .computing = true}}}, {4, {{.rank = 2}}}});
  ASSERT_EQ(sent_.size(), 1u) << "of a run that is not there, nothing is said";
  EXPECT_EQ(sent_[0].progress().run(), 5u);
  ASSERT_EQ(sent_[0].progress().ranks_size(), 1);
  EXPECT_EQ(sent_[0].progress().ranks(0).operations(), 9u);
  EXPECT_TRUE(sent_[0].progress().ranks(0).computing());

  machine_.OnRankDone(5, 1, RankOutput{.logits = {1, 2, 3}});
  machine_.OnRankDone(5, 2, absl::InternalError("NaN"));
  Do();
  ASSERT_EQ(sent_.size(), 3u);
  EXPECT_EQ(sent_[1].rank_done().logits_size(), 3);
  EXPECT_EQ(FromOutcome(sent_[2].rank_done().outcome()), absl::InternalError("NaN"));
  Hear([](v1::LeaderMessage& message) { message.mutable_finish()->set_run(5); });
  EXPECT_EQ(released_, std::vector<uint64_t>{5});
  EXPECT_EQ(machine_.reserved_bytes(), 0);
}

TEST_F(WorkerMachineTest, IgnoresWhatComesTwiceOrLate) {
  Join();
  HearPrepare(5);
  HearShard(5, 1);
  HearShard(5, 1);
  HearPrepare(5);
  HearRun(5);  // it is not prepared
  HearShard(4, 2);
  HearShard(5, 0);  // of another worker
  EXPECT_TRUE(prepared_.empty());
  EXPECT_TRUE(started_.empty());
  HearShard(5, 2);
  ASSERT_EQ(prepared_.size(), 1u);
  EXPECT_EQ(static_cast<int64_t>(prepared_[0].shards[0].size()),
            plan_.layout.ChunkTokens(plan_.RankAt(kFirstRank)));
  HearPrepare(3);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  v1::LeaderMessage other;
  other.mutable_cancel()->set_run(5);
  machine_.OnMessage(connection_ + 1, other, now_);
  Do();
  EXPECT_TRUE(stopped_.empty());
}

// A lease may end between the parts of its run's Prepare: nobody would end what is kept under it afterwards.
TEST_F(WorkerMachineTest, KeepsNothingUnderALeaseThatEndedMeanwhile) {
  Join();
  for (const uint64_t run : {5, 6}) {
    HearPrepare(run, 100, "lease");
    HearShard(run, 1);
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_kv_ends()->set_lease(run == 5 ? "another" : "lease");
    });
    HearShard(run, 2);
    ASSERT_EQ(prepared_.size(), run - 4);
    EXPECT_EQ(prepared_.back().keep_kv.has_value(), run == 5);
  }
}

TEST_F(WorkerMachineTest, ReservesNoMoreThanItOffers) {
  Join();
  HearPrepare(1, kMemory + 1);
  ASSERT_EQ(sent_.size(), 1u);
  const absl::Status status = FromOutcome(sent_[0].prepared().outcome());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(machine_.reserved_bytes(), 0);
  HearPrepare(2, 600);
  EXPECT_EQ(machine_.reserved_bytes(), 600);
  sent_.clear();
  HearPrepare(3, 600);  // beside the other
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(FromOutcome(sent_[0].prepared().outcome())));
  HearPrepare(4, 400);
  EXPECT_EQ(machine_.reserved_bytes(), 1000);
}

TEST_F(WorkerMachineTest, RefusesAPartThatIsNotOfItsPlan) {
  Join();
  Hear([&](v1::LeaderMessage& message) {
    v1::Prepare& prepare = *message.mutable_prepare();
    prepare.set_run(1);
    *prepare.mutable_plan() = ToRunPlan(plan_);
    prepare.set_first_rank(3);
    prepare.set_ranks(2);
  });
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(FromOutcome(sent_[0].prepared().outcome())));
}

TEST_F(WorkerMachineTest, RefusesMoreTokensThanARankHas) {
  Join();
  HearPrepare(1);
  HearShard(1, kFirstRank);
  sent_.clear();
  const int64_t tokens = plan_.layout.ChunkTokens(plan_.RankAt(kFirstRank + 1));
  Hear([&](v1::LeaderMessage& message) {
    v1::Shard& shard = *message.mutable_shard();
    shard.set_run(1);
    shard.set_rank(kFirstRank + 1);
    for (int64_t i = 0; i <= tokens; ++i) shard.add_ids(1);
  });
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(FromOutcome(sent_[0].prepared().outcome())));
  EXPECT_EQ(machine_.reserved_bytes(), 0);
  HearShard(1, kFirstRank + 1);
  EXPECT_TRUE(prepared_.empty()) << "that run is over";
}

TEST_F(WorkerMachineTest, RefusesAPrefixWhoseTokensWrapAround) {
  Join();
  Hear([&](v1::LeaderMessage& message) {
    v1::Prepare& prepare = *message.mutable_prepare();
    prepare.set_run(1);
    *prepare.mutable_plan() = ToRunPlan(plan_);
    prepare.mutable_plan()->set_cached_tokens(64);
    prepare.set_ranks(1);
    prepare.add_prefix()->set_tokens(UINT64_MAX - 63);
    prepare.add_prefix()->set_tokens(128);
  });
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(FromOutcome(sent_[0].prepared().outcome())));
}

TEST_F(WorkerMachineTest, KeepsRunsApart) {
  Join();
  BeginRun(5);
  BeginRun(6);
  EXPECT_EQ(machine_.reserved_bytes(), 200);
  Tick(absl::Milliseconds(200), {{5, {{.rank = 1}}}, {6, {{.rank = 1}, {.rank = 2}}}});
  ASSERT_EQ(sent_.size(), 2u);
  EXPECT_EQ(sent_[0].progress().run(), 5u);
  EXPECT_EQ(sent_[1].progress().run(), 6u);
  EXPECT_EQ(sent_[1].progress().ranks_size(), 2);

  HearCancel(5);
  EXPECT_EQ(stopped_, std::vector<uint64_t>{5});
  EXPECT_TRUE(ConfirmedStops().empty()) << "the host still stops";
  machine_.OnRunStopped(5, now_);
  Do();
  EXPECT_EQ(ConfirmedStops(), std::vector<uint64_t>{5});
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  sent_.clear();
  machine_.OnRankDone(5, 1, RankOutput{});  // late
  machine_.OnRankDone(6, 1, RankOutput{});
  Do();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].rank_done().run(), 6u);
}

TEST_F(WorkerMachineTest, LetsTheRunStandStillThatIsNamed) {
  const auto pause = [&](uint64_t run) {
    Hear([&](v1::LeaderMessage& message) { message.mutable_pause()->set_run(run); });
  };
  const auto resume = [&](uint64_t run) {
    Hear([&](v1::LeaderMessage& message) { message.mutable_resume()->set_run(run); });
  };
  Join();
  BeginRun(5);
  BeginRun(6);
  HearPrepare(7);
  pause(5);
  pause(7);  // not before Run
  pause(99);
  EXPECT_EQ(turns_, (std::vector<std::pair<uint64_t, bool>>{{5, false}}));
  EXPECT_EQ(machine_.reserved_bytes(), 300) << "with all it has";
  resume(5);
  pause(6);
  HearCancel(6);
  EXPECT_EQ(stopped_, std::vector<uint64_t>{6});
  resume(6);  // it is being stopped
  EXPECT_EQ(turns_, (std::vector<std::pair<uint64_t, bool>>{{5, false}, {5, true}, {6, false}}));
  Hear([](v1::LeaderMessage& message) { message.mutable_finish()->set_run(5); });
  pause(5);
  EXPECT_EQ(turns_.size(), 3u) << "it is over";
}

TEST_F(WorkerMachineTest, ConfirmsEveryCancel) {
  Join();
  HearCancel(3);  // it never began
  EXPECT_EQ(ConfirmedStops(), std::vector<uint64_t>{3});
  HearPrepare(3);
  EXPECT_EQ(machine_.reserved_bytes(), 0) << "a Prepare that comes after its Cancel is late";
  HearPrepare(4);
  HearCancel(4);  // its host knows nothing of it
  EXPECT_EQ(ConfirmedStops(), (std::vector<uint64_t>{3, 4}));
  EXPECT_TRUE(stopped_.empty());
  EXPECT_EQ(machine_.reserved_bytes(), 0);
}

TEST_F(WorkerMachineTest, StopsAllRunsWhenTheLeaderIsGoneAndJoinsOnceTheHostStandsStill) {
  Join();
  BeginRun(5);
  HearPrepare(6);
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  Do();
  EXPECT_FALSE(machine_.member());
  EXPECT_EQ(stopped_, std::vector<uint64_t>{5});
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  Tick(absl::Seconds(10));
  EXPECT_EQ(connects_, 1) << "its ranks still compute";
  machine_.OnRunStopped(5, now_);
  Tick();
  EXPECT_EQ(connects_, 2);
  EXPECT_TRUE(ConfirmedStops().empty()) << "nobody waits for it";
  EXPECT_TRUE(sent_.back().has_join());
  EXPECT_EQ(sent_.back().epoch(), kEpoch) << "the newest that it has heard of";
}

TEST_F(WorkerMachineTest, LeavesASilentLeader) {
  Join();
  Tick(absl::Milliseconds(2900));
  EXPECT_TRUE(machine_.member());
  Tick(absl::Milliseconds(100));
  EXPECT_FALSE(machine_.member());
  EXPECT_EQ(disconnects_, 1);
}

TEST_F(WorkerMachineTest, TriesAgainLaterAndLaterUnlessItIsRefusedForGood) {
  const auto refuse = [&](bool retry) {
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_refused()->set_reason("no");
      message.mutable_refused()->set_retry(retry);
    });
  };
  Tick();
  std::vector<absl::Duration> waits;
  for (int i = 0; i < 7; ++i) {
    refuse(true);
    const absl::Time refused_at = now_;
    for (const int before = connects_; connects_ == before;) Tick(absl::Milliseconds(50));
    waits.push_back(now_ - refused_at);
  }
  EXPECT_EQ(waits.front(), absl::Milliseconds(100));
  EXPECT_TRUE(std::is_sorted(waits.begin(), waits.end()));
  EXPECT_EQ(waits.back(), absl::Seconds(2));
  EXPECT_FALSE(exit_.has_value());
  refuse(false);
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(absl::IsFailedPrecondition(*exit_)) << *exit_;
}

TEST_F(WorkerMachineTest, DrainsAfterItsRun) {
  Join();
  BeginRun(5);
  machine_.Drain(now_);
  Do();
  ASSERT_FALSE(sent_.empty());
  EXPECT_TRUE(sent_.back().has_leave());
  Hear([](v1::LeaderMessage& message) { message.mutable_finish()->set_run(5); });
  EXPECT_FALSE(exit_.has_value()) << "the leader says when";
  Hear([](v1::LeaderMessage& message) { message.mutable_goodbye(); });
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok()) << *exit_;
}

TEST_F(WorkerMachineTest, DrainsWithoutALeaderOnceItsHostStandsStill) {
  Join();
  BeginRun(5);
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  machine_.Drain(now_);
  Do();
  EXPECT_FALSE(exit_.has_value());
  machine_.OnRunStopped(5, now_);
  Do();
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok()) << *exit_;
}

}  // namespace
}  // namespace meshfill
