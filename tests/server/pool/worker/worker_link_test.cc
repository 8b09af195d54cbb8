// The worker's machine and its leader: joining, losing, draining, and what it hears of its K and V; all in
// virtual time.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/server/pool/worker/worker_machine_fixture.h"

namespace meshfill {
namespace {

using WorkerLinkTest = WorkerMachineFixture;

TEST_F(WorkerLinkTest, LeavesASilentLeader) {
  Join();
  Tick(absl::Milliseconds(2900));
  EXPECT_TRUE(machine_.member());
  Tick(absl::Milliseconds(100));
  EXPECT_FALSE(machine_.member());
  EXPECT_EQ(disconnects_, 1);
}

TEST_F(WorkerLinkTest, TriesAgainLaterAndLaterUnlessItIsRefusedForGood) {
  Tick();
  std::vector<absl::Duration> waits;
  for (int i = 0; i < 7; ++i) {
    HearRefused(/*retry=*/true);
    waits.push_back(Reconnect());
  }
  EXPECT_EQ(waits.front(), absl::Milliseconds(100));
  EXPECT_TRUE(std::is_sorted(waits.begin(), waits.end()));
  EXPECT_EQ(waits.back(), absl::Seconds(2));
  EXPECT_FALSE(exit_.has_value());
  HearRefused(/*retry=*/false);
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(absl::IsFailedPrecondition(*exit_)) << *exit_;
}

TEST_F(WorkerLinkTest, DrainsAfterItsRun) {
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

TEST_F(WorkerLinkTest, DrainsWithoutALeaderOnceItsHostStandsStill) {
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

TEST_F(WorkerLinkTest, OnceItBelongedToAPoolItComesBackSoon) {
  Tick();
  for (int i = 0; i < 6; ++i) {
    HearRefused(/*retry=*/true);
    Reconnect();
  }
  HearWelcome();
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  Do();
  EXPECT_EQ(Reconnect(), absl::Milliseconds(100));
}

TEST_F(WorkerLinkTest, ALeaderThatNeverAnswersIsLeft) {
  Tick();
  EXPECT_EQ(connects_, 1);
  Tick(absl::Milliseconds(2900));
  EXPECT_EQ(disconnects_, 0);
  Tick(absl::Milliseconds(100));
  EXPECT_EQ(disconnects_, 1);
  Reconnect();
  EXPECT_EQ(connects_, 2);
}

// A leader that was started again counts its runs from 1, and knows of no lease.
TEST_F(WorkerLinkTest, ANewLeaderBeginsAnew) {
  Join();
  HearPrepare(7);
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  Do();
  Reconnect();
  EXPECT_TRUE(kv_.empty());
  HearWelcome();
  EXPECT_EQ(kv_, std::vector<std::string>{"all ends"});
  HearWelcome();  // twice
  EXPECT_EQ(kv_.size(), 1u);
  HearPrepare(1);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  HearPrepare(1);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
}

TEST_F(WorkerLinkTest, TheLateEndOfAnEarlierStreamIsNoEndOfThisOne) {
  Join();
  const WorkerMachine::Connection earlier = connection_;
  machine_.OnDisconnected(earlier, absl::UnavailableError("reset"), now_);
  Do();
  Reconnect();
  HearWelcome();
  BeginRun(5);
  machine_.OnDisconnected(earlier, absl::UnavailableError("reset"), now_);
  Do();
  EXPECT_TRUE(machine_.member());
  EXPECT_TRUE(stopped_.empty());
}

// Its silence counts from when it was called.
TEST_F(WorkerLinkTest, ALeaderThatIsCalledAgainMayTakeItsTime) {
  Join();
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  Do();
  Tick(absl::Minutes(1));
  EXPECT_EQ(connects_, 2);
  Tick(absl::Seconds(2));
  EXPECT_EQ(disconnects_, 0);
  HearWelcome();
  EXPECT_TRUE(machine_.member());
}

TEST_F(WorkerLinkTest, EpochsOnlyGrow) {
  Join();
  v1::LeaderMessage late;
  late.set_epoch(kEpoch - 3);
  late.mutable_heartbeat();
  machine_.OnMessage(connection_, late, now_);
  Tick(absl::Milliseconds(200));
  ASSERT_FALSE(sent_.empty());
  EXPECT_EQ(sent_.back().epoch(), kEpoch);
}

// A run keeps the epoch that it began in, though workers have come since.
TEST_F(WorkerLinkTest, WhatItSaysOfARunIsOfTheRunsEpoch) {
  Join();
  BeginRun(5);
  Hear([](v1::LeaderMessage& message) {
    message.set_epoch(kEpoch + 2);
    message.mutable_heartbeat();
  });
  progress_ = {{5, {{.rank = kFirstRank, .layers_done = 1}}}};
  Tick(absl::Seconds(1));
  ASSERT_TRUE(sent_.back().has_progress());
  EXPECT_EQ(sent_.back().epoch(), kEpoch);
  machine_.OnRankDone(5, kFirstRank, RankOutput{});
  Do();
  ASSERT_TRUE(sent_.back().has_rank_done());
  EXPECT_EQ(sent_.back().epoch(), kEpoch);
}

// A leader blames a prompt for an end only where its ranks have computed, and the next report would be late.
TEST_F(WorkerLinkTest, SaysWhetherItsRanksComputedBeforeItSaysThatARunEnds) {
  for (const bool fails : {false, true}) {
    const uint64_t run = fails ? 6 : 5;
    if (!fails) Join();
    BeginRun(run);
    progress_ = {{run, {{.rank = kFirstRank, .has_computed = true}}}};
    if (fails) {
      machine_.OnRankDone(run, kFirstRank, absl::InternalError("it failed"));
      Do();
    } else {
      Hear([&](v1::LeaderMessage& message) { message.mutable_abort()->set_run(run); });
      machine_.OnRunStopped(run, now_);
      Do();
    }
    ASSERT_EQ(sent_.size(), 2u);
    ASSERT_EQ(sent_[0].progress().ranks_size(), 1);
    EXPECT_TRUE(sent_[0].progress().ranks(0).has_computed());
    EXPECT_TRUE(fails ? sent_[1].has_rank_done() : sent_[1].has_stopped());
  }
  sent_.clear();
  machine_.OnRankDone(6, kFirstRank + 1, RankOutput{});
  Do();
  EXPECT_EQ(sent_.size(), 1u) << "what has gone well has computed";
}

TEST_F(WorkerLinkTest, SaysThatItLivesWhileItPrepares) {
  Join();
  HearPrepare(5);
  sent_.clear();
  Tick(absl::Milliseconds(200));
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(sent_[0].has_progress());
}

TEST_F(WorkerLinkTest, HearsWhatBecomesOfItsKv) {
  Join();
  Hear([](v1::LeaderMessage& message) {
    message.mutable_kv_lasts()->set_lease("x");
    message.mutable_kv_lasts()->set_seconds(1.5);
  });
  Hear([](v1::LeaderMessage& message) { message.mutable_kv_ends()->set_lease("y"); });
  Hear([](v1::LeaderMessage& message) { message.mutable_kv_run_ends()->set_run(3); });
  EXPECT_EQ(kv_, (std::vector<std::string>{"x lasts 1.5s", "y ends", "run 3 ends"}));
}

TEST_F(WorkerLinkTest, HearsThatItsSpeedIsWrong) {
  Join();
  Hear([](v1::LeaderMessage& message) { message.mutable_heartbeat(); });
  EXPECT_EQ(speeds_forgotten_, 0);
  Hear([](v1::LeaderMessage& message) { message.mutable_forget_speed(); });
  EXPECT_EQ(speeds_forgotten_, 1);
}

TEST_F(WorkerLinkTest, ADrainBeforeTheWelcomeIsSaidAfterIt) {
  Tick();
  machine_.Drain(now_);
  Do();
  EXPECT_FALSE(sent_.back().has_leave()) << "nobody knows it yet";
  EXPECT_FALSE(exit_.has_value());
  HearWelcome();
  EXPECT_TRUE(sent_.back().has_leave());
  Hear([](v1::LeaderMessage& message) { message.mutable_goodbye(); });
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok()) << *exit_;
}

TEST_F(WorkerLinkTest, ADrainHasAnEnd) {
  Join();
  BeginRun(5);
  machine_.Drain(now_);
  Do();
  const auto pass = [&](absl::Duration time) {
    machine_.Drain(now_);  // it drains already
    now_ += time;
    Hear([](v1::LeaderMessage& message) { message.mutable_heartbeat(); });
    Tick();
  };
  for (int i = 0; i < 5; ++i) pass(absl::Minutes(10));
  pass(absl::Minutes(10) - absl::Milliseconds(1));
  EXPECT_FALSE(exit_.has_value());
  pass(absl::Milliseconds(1));
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(absl::IsDeadlineExceeded(*exit_)) << *exit_;
  const auto leaves =
      std::count_if(sent_.begin(), sent_.end(), [](const auto& each) { return each.has_leave(); });
  EXPECT_EQ(leaves, 1);
  exit_.reset();
  Tick(absl::Hours(1));
  EXPECT_FALSE(exit_.has_value()) << "once";
}

TEST_F(WorkerLinkTest, WhomTheLeaderLetsGoStaysAway) {
  Join();
  Hear([](v1::LeaderMessage& message) { message.mutable_goodbye(); });
  EXPECT_FALSE(machine_.member());
  EXPECT_EQ(disconnects_, 1);
  EXPECT_FALSE(exit_.has_value()) << "nobody told it to end";
  Tick(absl::Hours(1));
  EXPECT_EQ(connects_, 1);
  machine_.Drain(now_);
  Do();
  ASSERT_TRUE(exit_.has_value());
  EXPECT_TRUE(exit_->ok()) << *exit_;
}

}  // namespace
}  // namespace meshfill
