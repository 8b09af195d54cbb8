// Runs whose messages do not mix: where they stand still, and which of them goes on.
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

class PausesLeaderTest : public LeaderFixture {
 protected:
  PausesLeaderTest() : LeaderFixture(Options(3)) {}

  void SetUp() override {
    for (const Leader::Connection worker : {1, 2}) {
      v1::Join offer = Offer(absl::StrCat("w", worker));
      offer.set_messages_mix(false);
      ASSERT_EQ(Join(worker, offer), "");
    }
    first_ = Begin(first_run_);
  }

  // A request whose run has been prepared.
  Leader::Ticket Begin(uint64_t& run) {
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({1, 2});
    run = run_;
    return newest_;
  }
  void SetPaused(Leader::Ticket ticket, bool paused) {
    leader_.SetPaused(ticket, paused, now_);
    Do();
  }
  void Paused(Leader::Connection worker, uint64_t run, uint64_t number, uint64_t messages,
              bool still = false) {
    v1::WorkerMessage message = OfRun();
    message.mutable_paused()->set_run(run);
    message.mutable_paused()->set_number(number);
    message.mutable_paused()->set_messages(messages);
    message.mutable_paused()->set_still(still);
    Say(worker, message);
  }
  void StandStill(uint64_t run, uint64_t number) {
    for (const Leader::Connection worker : {1, 2}) Paused(worker, run, number, 5);
    for (const Leader::Connection worker : {1, 2}) Paused(worker, run, number, 0, /*still=*/true);
  }
  void Finish(uint64_t run) {
    run_ = run;
    RankDone(1, 0, 0);
    RankDone(2, 1, kVocab);
  }
  // The first request fails twice, each time 2 s after it was asked to stand still, which it may do at last.
  void FailTwice(bool stands) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (attempt > 0) {
        SetPaused(first_, false);
        Prepare({1, 2});
      }
      SetPaused(first_, true);
      const uint64_t run = leader_.run_of(first_);
      for (const Leader::Connection worker : {1, 2}) Paused(worker, run, 1, 5);
      run_ = run;
      for (const uint32_t rank : {0u, 1u}) SayOperations(rank + 1, 5, rank, /*has_computed=*/true);
      Pass(absl::Seconds(2), {1, 2});
      for (const Leader::Connection worker : {1, 2}) {
        if (stands) Paused(worker, run, 1, 0, /*still=*/true);
      }
      v1::WorkerMessage failed = OfRun();
      failed.mutable_rank_done()->set_run(run);
      failed.mutable_rank_done()->mutable_outcome()->set_code(
          static_cast<int>(absl::StatusCode::kUnavailable));
      Say(1, failed);
      for (const Leader::Connection worker : {1, 2}) Stopped(worker);
    }
  }
  const v1::LeaderMessage& Last(Leader::Connection worker = 1) { return sent_[worker].back(); }
  bool Runs(uint64_t run) {
    for (const v1::LeaderMessage& message : sent_[1]) {
      if (message.has_run() && message.run().run() == run) return true;
    }
    return false;
  }

  Leader::Ticket first_ = 0;
  uint64_t first_run_ = 0;
};

TEST_F(PausesLeaderTest, AnotherRunBeginsWhenAllStandBeforeTheSameMessage) {
  EXPECT_TRUE(Runs(first_run_));
  SetPaused(first_, true);
  for (const Leader::Connection worker : {1, 2}) {
    EXPECT_EQ(Last(worker).pause().run(), first_run_);
    EXPECT_EQ(Last(worker).pause().number(), 1u);
  }
  uint64_t second = 0;
  Begin(second);
  EXPECT_FALSE(Runs(second)) << "it is prepared meanwhile";
  Paused(1, first_run_, 1, 7);
  Paused(1, first_run_, 1, 7);  // comes twice
  EXPECT_FALSE(Last().has_pause_at());
  Paused(2, first_run_, 1, 9);
  for (const Leader::Connection worker : {1, 2}) {
    EXPECT_EQ(Last(worker).pause_at().run(), first_run_);
    EXPECT_EQ(Last(worker).pause_at().number(), 1u);
    EXPECT_EQ(Last(worker).pause_at().messages(), 9u);
  }
  Paused(2, first_run_, 1, 9);  // comes twice
  Paused(2, first_run_, 1, 0, /*still=*/true);
  Paused(2, first_run_, 1, 0, /*still=*/true);
  EXPECT_FALSE(Runs(second));
  Paused(1, first_run_, 1, 0, /*still=*/true);
  EXPECT_TRUE(Runs(second));
  const size_t told = sent_[1].size();
  Paused(1, first_run_, 1, 7);  // late
  SetPaused(first_, false);
  EXPECT_EQ(sent_[1].size(), told) << "the second one is under way";
  Finish(second);
  EXPECT_EQ(Last().resume().run(), first_run_);
  Finish(first_run_);
  ASSERT_EQ(answers_.size(), 2u);
  for (const auto& answer : answers_) EXPECT_TRUE(answer.ok()) << answer.status();
}

TEST_F(PausesLeaderTest, APauseThatIsTakenBackIsForgotten) {
  SetPaused(first_, true);
  Paused(1, first_run_, 1, 7);
  SetPaused(first_, false);
  EXPECT_EQ(Last().resume().run(), first_run_);
  SetPaused(first_, true);
  EXPECT_EQ(Last().pause().number(), 2u);
  Paused(2, first_run_, 1, 7);  // an answer to the first one
  Paused(1, first_run_, 2, 9);
  EXPECT_FALSE(Last().has_pause_at());
  Paused(2, first_run_, 2, 8);
  EXPECT_EQ(Last().pause_at().messages(), 9u) << "the furthest one answered first";
  EXPECT_EQ(Last().pause_at().number(), 2u);
  SetPaused(first_, false);
  EXPECT_EQ(Last().resume().run(), first_run_);
  Finish(first_run_);
  EXPECT_EQ(answers_.size(), 1u);
}

TEST_F(PausesLeaderTest, ARunThatNobodyPausesGoesOnToItsEnd) {
  uint64_t second = 0, third = 0;
  Begin(second);
  Begin(third);
  EXPECT_FALSE(Runs(second) || Runs(third));
  EXPECT_FALSE(Last().has_pause());
  Finish(first_run_);
  EXPECT_TRUE(Runs(second));
  EXPECT_FALSE(Runs(third));
  Finish(second);
  EXPECT_TRUE(Runs(third));
}

TEST_F(PausesLeaderTest, ARunWaitsForNoneOnOtherWorkers) {
  Finish(first_run_);
  for (const Leader::Connection worker : {1, 2}) {
    Submit(std::vector<uint32_t>(200, 1), {.submeshes = 2});
    ASSERT_EQ(leader_.PlaceOf(newest_), worker);
    Prepare({worker});
    EXPECT_EQ(Last(worker).run().run(), run_);
  }
}

// The second's workers had not computed before.
TEST_F(PausesLeaderTest, ARunThatIsPausedOnItsWayGivesWay) {
  uint64_t second = 0;
  const Leader::Ticket ticket = Begin(second);
  SetPaused(ticket, true);
  Finish(first_run_);
  EXPECT_FALSE(Runs(second));
  SetPaused(ticket, false);
  EXPECT_TRUE(Runs(second));
}

TEST_F(PausesLeaderTest, AStoppedRunHoldsUpTheNextOneUntilItStands) {
  uint64_t second = 0;
  Begin(second);
  leader_.CancelRequest(first_, absl::CancelledError("enough"), now_);
  Do();
  EXPECT_FALSE(Runs(second));
  run_ = first_run_;
  Stopped(1);
  EXPECT_FALSE(Runs(second));
  Stopped(2);
  EXPECT_TRUE(Runs(second));
}

// What stands still goes on where the one whose turn it is finds no room: one after the other.
TEST_F(PausesLeaderTest, WhoWaitsForRoomLetsOneGoOn) {
  SetPaused(first_, true);
  StandStill(first_run_, 1);
  uint64_t second = 0, third = 0;
  const Leader::Ticket ticket = Begin(second);
  SetPaused(ticket, true);
  StandStill(second, 1);
  const Leader::Ticket other = Begin(third);
  SetPaused(other, true);
  StandStill(third, 1);
  Submit(std::vector<uint32_t>(200, 1));
  ASSERT_TRUE(leader_.CrowdedOut(newest_));
  EXPECT_EQ(Last().resume().run(), first_run_);
  SetPaused(other, false);  // its turn: the first gives way again
  EXPECT_EQ(Last().pause().run(), first_run_);
  EXPECT_EQ(Last().pause().number(), 2u);
  StandStill(first_run_, 2);
  EXPECT_EQ(Last().resume().run(), third);
  Finish(third);
  EXPECT_NE(leader_.run_of(newest_), 0u);
}

TEST_F(PausesLeaderTest, RanksThatDoNotComeToStandHang) {
  SetPaused(first_, true);
  Paused(1, first_run_, 1, 7);
  Paused(2, first_run_, 1, 7);
  Paused(1, first_run_, 1, 0, /*still=*/true);
  run_ = first_run_;
  Pass(absl::Seconds(5), {1, 2});
  EXPECT_EQ(Last().abort().run(), first_run_);
  EXPECT_EQ(Last().abort().reason(), "no rank makes progress");
}

TEST_F(PausesLeaderTest, WhatStandsStillDoesNotHang) {
  SetPaused(first_, true);
  StandStill(first_run_, 1);
  run_ = first_run_;
  Pass(absl::Seconds(20), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 2);
  EXPECT_FALSE(Last().has_abort());
}

// It computed until it stood still, whenever it was asked to.
TEST_F(PausesLeaderTest, WhoCameToStandJustNowMayBeToBlame) {
  FailTwice(/*stands=*/true);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_.back().status())) << answers_.back().status();
}

TEST_F(PausesLeaderTest, WhoIsOnItsWayToStandMayBeToBlame) {
  FailTwice(/*stands=*/false);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_.back().status())) << answers_.back().status();
}

}  // namespace
}  // namespace meshfill
