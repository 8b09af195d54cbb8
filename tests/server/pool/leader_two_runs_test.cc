// Two runs at once: which stands still, hangs, drains or is cancelled, and who is to blame for a lost worker.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

// A leader that runs two requests at once.
class TwoRunsLeaderTest : public LeaderFixture {
 protected:
  TwoRunsLeaderTest() : LeaderFixture(Options(2)) {}

  void SetUp() override {
    Join(1, Offer("a"));
    Join(2, Offer("b"));
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({1, 2});
    first_ = run_;
    first_ticket_ = newest_;
    ticket_ = leader_.Submit({.id = "r8", .tokens = tokens_, .options = {}}, now_);
    Do();
    Prepare({1, 2});
    second_ = run_;
    ASSERT_EQ(second_, first_ + 1);
  }
  void Finish(uint64_t run) {
    run_ = run;
    RankDone(1, 0, 0);
    RankDone(2, 1, kVocab);
  }
  int PreparesOf(Leader::Connection connection) {
    return static_cast<int>(
        std::count_if(sent_[connection].begin(), sent_[connection].end(),
                      [](const v1::LeaderMessage& message) { return message.has_prepare(); }));
  }

  void SetPaused(Leader::Ticket ticket, bool paused) {
    leader_.SetPaused(ticket, paused, now_);
    Do();
  }
  // Ends both runs at worker 1, which is left.
  void BothStop() {
    v1::WorkerMessage stopped = OfRun();
    for (const uint64_t run : {second_, first_}) {
      stopped.mutable_stopped()->set_run(run);
      Say(1, stopped);
    }
  }

  uint64_t first_ = 0, second_ = 0;
  Leader::Ticket first_ticket_ = 0;
  Leader::Ticket ticket_ = 0;  // of the second
};

TEST_F(TwoRunsLeaderTest, APausedRunStandsStillAndDoesNotHang) {
  SetPaused(first_ticket_, true);
  for (const Leader::Connection worker : {1, 2}) {
    ASSERT_TRUE(sent_[worker].back().has_pause());
    EXPECT_EQ(sent_[worker].back().pause().run(), first_);
  }
  SetPaused(first_ticket_, true);
  EXPECT_TRUE(sent_[1].back().has_pause());
  Finish(second_);
  EXPECT_EQ(answers_.back()->paused_seconds, 0);
  run_ = first_;
  Pass(absl::Seconds(20), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 2) << "what stands still does not hang";
  SetPaused(first_ticket_, false);
  for (const Leader::Connection worker : {1, 2}) EXPECT_EQ(sent_[worker].back().resume().run(), first_);
  Pass(absl::Milliseconds(1900), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 2) << "its time counts from here";
  Finish(first_);
  ASSERT_EQ(answers_.size(), 2u);
  ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
  EXPECT_NEAR(answers_.back()->seconds, 1.9, 0.11) << "without the pause";
  EXPECT_NEAR(answers_.back()->paused_seconds, 20, 0.1);
  EXPECT_EQ(answers_.back()->attempts, 1);
}

TEST_F(TwoRunsLeaderTest, APauseBeforeItsFirstRunIsNoneOfThePrefill) {
  const Leader::Ticket third = leader_.Submit({.id = "r9", .tokens = tokens_, .options = {}}, now_);
  SetPaused(third, true);
  ASSERT_TRUE(leader_.CrowdedOut(third));
  Pass(absl::Seconds(1), {1, 2});
  SetPaused(third, false);
  Finish(first_);
  Finish(second_);
  ASSERT_EQ(answers_.size(), 2u);
  Prepare({1, 2});
  ASSERT_EQ(run_, leader_.run_of(third));
  Finish(run_);
  ASSERT_EQ(answers_.size(), 3u);
  ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
  EXPECT_EQ(answers_.back()->paused_seconds, 0);
}

TEST_F(TwoRunsLeaderTest, ARunThatHangsBetweenItsPausesIsNoticed) {
  Finish(second_);
  run_ = first_;
  for (int turn = 0; turn < 4; ++turn) {
    EXPECT_EQ(leader_.capacity().ranks, 2) << turn;
    SetPaused(first_ticket_, true);
    Pass(absl::Seconds(3), {1, 2}, /*computing=*/true);
    SetPaused(first_ticket_, false);
    Pass(absl::Milliseconds(550), {1, 2}, /*computing=*/true);
  }
  EXPECT_EQ(leader_.capacity().ranks, 0);
}

// A rank may move after the pause was asked for. From the resume on it has moved at that moment at the
// latest.
TEST_F(TwoRunsLeaderTest, ARunThatHangsAfterItMovedInItsPauseIsNoticed) {
  Finish(second_);
  run_ = first_;
  SetPaused(first_ticket_, true);
  Pass(absl::Seconds(20), {1, 2}, /*computing=*/true);
  SayOperations(1, 1000);
  SetPaused(first_ticket_, false);
  EXPECT_EQ(leader_.capacity().ranks, 2);
  Pass(absl::Milliseconds(2100), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 0);
}

TEST_F(TwoRunsLeaderTest, APausedRunIsPreparedAndBeginsAtItsTurn) {
  Finish(second_);
  SetPaused(first_ticket_, true);
  const Leader::Ticket third = leader_.Submit({.id = "r9", .tokens = tokens_, .options = {}}, now_);
  SetPaused(third, true);
  Prepare({1, 2});
  ASSERT_EQ(run_, second_ + 1);
  Pass(absl::Seconds(20), {1, 2});
  EXPECT_EQ(leader_.capacity().ranks, 2) << "its workers have done what they were to do";
  EXPECT_FALSE(sent_[1].back().has_run() || sent_[1].back().has_pause());
  SetPaused(third, false);
  EXPECT_EQ(sent_[1].back().run().run(), second_ + 1);
  Finish(second_ + 1);
  EXPECT_EQ(answers_.size(), 2u);
}

TEST_F(TwoRunsLeaderTest, WhoeverComputedIsToBlameAndNotWhoStoodStill) {
  SetPaused(first_ticket_, true);
  Pass(absl::Seconds(2), {1, 2});
  Join(3, Offer("c"));
  leader_.OnDisconnected(2, now_);
  BothStop();
  ASSERT_EQ(PreparesOf(1), 3) << "a paused request begins no run";
  Prepare({1, 3});
  EXPECT_EQ(run_, leader_.run_of(ticket_));
  EXPECT_EQ(leader_.run_of(first_ticket_), 0u);
  leader_.OnDisconnected(3, now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
  EXPECT_NE(answers_[0].status().message().find("request r8 "), absl::string_view::npos);
  Stopped(1);

  // Once more, now by its own run: that is the first time.
  SetPaused(first_ticket_, false);
  Prepare({1});
  Join(4, Offer("d"));
  leader_.OnDisconnected(1, now_);
  Do();
  EXPECT_EQ(answers_.size(), 1u);
  Prepare({4});
  RankDone(4, 0, kVocab);
  ASSERT_EQ(answers_.size(), 2u);
  ASSERT_TRUE(answers_[1].ok()) << answers_[1].status();
  EXPECT_EQ(answers_[1]->attempts, 3);
  EXPECT_NEAR(answers_[1]->paused_seconds, 2, 0.1);
}

// The run that stood still is stopped first, and is not over when the other one is to blame.
TEST_F(TwoRunsLeaderTest, WhoComputesBesideOneThatStandsStillIsAlone) {
  for (const Leader::Connection lost : {2, 3}) {
    SetPaused(first_ticket_, true);
    Pass(absl::Seconds(2), {1, lost});
    EXPECT_TRUE(answers_.empty());
    const Leader::Connection next = lost + 1;
    Join(next, Offer(absl::StrCat("w", next)));
    leader_.OnDisconnected(lost, now_);
    SetPaused(first_ticket_, false);
    v1::WorkerMessage stopped = OfRun();
    for (const uint64_t run : {first_, second_}) {
      stopped.mutable_stopped()->set_run(run);
      Say(1, stopped);
    }
    PrepareRun(first_ = leader_.run_of(first_ticket_), {1, next});
    if (lost == 2) PrepareRun(second_ = leader_.run_of(ticket_), {1, next});
  }
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
  EXPECT_NE(answers_[0].status().message().find("request r8 "), absl::string_view::npos);
}

TEST_F(TwoRunsLeaderTest, WhoeverStoodStillIsNoSuspect) {
  SetPaused(first_ticket_, true);
  Pass(absl::Seconds(2), {1, 2});
  leader_.OnDisconnected(2, now_);
  SetPaused(ticket_, true);
  SetPaused(first_ticket_, false);
  BothStop();
  Prepare({1});
  EXPECT_EQ(run_, leader_.run_of(first_ticket_));
  leader_.OnDisconnected(1, now_);
  Do();
  ASSERT_TRUE(answers_.empty()) << "it is the first time";
  Join(3, Offer("c"));
  Prepare({3});
  RankDone(3, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
}

TEST_F(TwoRunsLeaderTest, AWorkerThatDrainsStaysForAllItsRuns) {
  SetPaused(first_ticket_, true);
  v1::WorkerMessage leave = OfRun();
  leave.mutable_leave();
  Say(2, leave);
  const auto is_let_go = [this] {
    return std::any_of(sent_[2].begin(), sent_[2].end(),
                       [](const v1::LeaderMessage& message) { return message.has_goodbye(); });
  };
  Finish(second_);
  EXPECT_EQ(answers_.size(), 1u);
  EXPECT_FALSE(is_let_go()) << "the other run stands still there";
  SetPaused(first_ticket_, false);
  EXPECT_TRUE(sent_[2].back().has_resume());
  Finish(first_);
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(answers_[0].ok() && answers_[1].ok());
  EXPECT_TRUE(is_let_go());
}

// Two compute when a worker is lost: each may be to blame. The one that does it again alone is; the other one
// then begins with a clean slate.
TEST_F(TwoRunsLeaderTest, SuspicionCountsOnceAndEndsWithWhoIsToBlame) {
  Join(3, Offer("c"));
  leader_.OnDisconnected(2, now_);
  SetPaused(first_ticket_, true);
  BothStop();
  Prepare({1, 3});
  EXPECT_EQ(run_, leader_.run_of(ticket_));
  leader_.OnDisconnected(3, now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
  Stopped(1);

  SetPaused(first_ticket_, false);
  Prepare({1});
  leader_.OnDisconnected(1, now_);
  Do();
  EXPECT_EQ(answers_.size(), 1u) << "the first time that it was alone";
  Join(4, Offer("d"));
  Prepare({4});
  leader_.OnDisconnected(4, now_);
  Do();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsInternal(answers_[1].status())) << answers_[1].status();
}

TEST_F(TwoRunsLeaderTest, WhoIsNeverAloneIsNotRefusedAsPoisonous) {
  for (Leader::Connection worker = 1; worker < 7; worker += 2) {
    for (const Leader::Connection next : {worker + 2, worker + 3}) Join(next, Offer(absl::StrCat("w", next)));
    leader_.OnDisconnected(worker, now_);
    leader_.OnDisconnected(worker + 1, now_);
    Do();
    PrepareRun(first_ = leader_.run_of(first_ticket_), {worker + 2, worker + 3});
    PrepareRun(second_ = leader_.run_of(ticket_), {worker + 2, worker + 3});
  }
  EXPECT_TRUE(answers_.empty());
  for (const uint64_t run : {first_, second_}) {
    run_ = run;
    RankDone(7, 0, 0);
    RankDone(8, 1, kVocab);
  }
  ASSERT_EQ(answers_.size(), 2u);
  for (const auto& answer : answers_) EXPECT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answers_[0]->attempts, 4);
}

TEST_F(TwoRunsLeaderTest, AThirdRequestWaitsForTheEndOfOne) {
  leader_.Submit({.id = "r9", .tokens = tokens_, .options = {}}, now_);
  Do();
  EXPECT_EQ(PreparesOf(1), 2);
  Finish(second_);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(PreparesOf(1), 3);
  Prepare({1, 2});
  EXPECT_EQ(run_, second_ + 1);
  Finish(first_);
  Finish(second_ + 1);
  EXPECT_EQ(answers_.size(), 3u);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(TwoRunsLeaderTest, ACancelStopsOneRunAndNotTheOther) {
  leader_.CancelRequest(ticket_, absl::CancelledError("the client left"), now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsCancelled(answers_[0].status()));
  ASSERT_TRUE(sent_[1].back().has_cancel());
  EXPECT_EQ(sent_[1].back().cancel().run(), second_);
  Finish(first_);
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(answers_[1].ok()) << answers_[1].status();
  EXPECT_FALSE(leader_.idle());
  run_ = second_;
  Stopped(1);
  Stopped(2);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(TwoRunsLeaderTest, ALostWorkerEndsEveryRunThatItTookPartIn) {
  leader_.OnDisconnected(2, now_);
  Do();
  EXPECT_TRUE(answers_.empty());
  v1::WorkerMessage stopped = OfRun();
  for (const uint64_t run : {second_, first_}) {  // both begin again, over who is left, in a new epoch
    stopped.mutable_stopped()->set_run(run);
    Say(1, stopped);
  }
  EXPECT_EQ(PreparesOf(1), 4);
  Prepare({1});
  const uint64_t last = run_;
  EXPECT_EQ(last, second_ + 2);
  EXPECT_EQ(leader_.counters().retries, 2u);
}

}  // namespace
}  // namespace meshfill
