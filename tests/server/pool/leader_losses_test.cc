// Which workers are lost or kept out, and what then becomes of the request: its answer, its error, or a wait.
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

using LeaderTest = LeaderFixture;

TEST_F(LeaderTest, WhoDoesNotPrepareIsKeptOutForAWhile) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  absl::Duration kept_out = absl::Seconds(10);
  Leader::Connection b = 2;
  for (int time = 0; time < 3; ++time, kept_out *= 2) {
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({1});
    Pass(Options().prepare_timeout + absl::Seconds(1), {1, b});
    ASSERT_EQ(closed_.back(), b) << "it lives, but does not prepare";
    Stopped(1);
    Prepare({1});
    RankDone(1, 0, kVocab);
    ASSERT_EQ(answers_.size(), static_cast<size_t>(time + 1));
    EXPECT_NE(Join(++b, Offer("b")), "");
    EXPECT_TRUE(sent_[b].back().refused().retry());
    EXPECT_EQ(Join(100 + b, Offer(absl::StrCat("c", b))), "") << "another one may";
    leader_.OnDisconnected(100 + b, now_);
    Pass(kept_out - absl::Seconds(2), {1});
    EXPECT_NE(Join(++b, Offer("b")), "");
    Pass(absl::Seconds(2), {1});
    ASSERT_EQ(Join(++b, Offer("b")), "");
  }
}

TEST_F(LeaderTest, TheOnlyWorkerIsNotKeptOut) {
  Join(1, Offer("a"));
  Submit(std::vector<uint32_t>(200, 1));
  Pass(Options().prepare_timeout + absl::Seconds(1), {1});
  ASSERT_EQ(closed_.back(), 1u);
  EXPECT_EQ(Join(2, Offer("a")), "");
}

TEST_F(LeaderTest, SilentWorkersAreLostWithinTwoSeconds) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Pass(absl::Milliseconds(1400), {1});
  EXPECT_EQ(leader_.capacity().ranks, 2);
  Pass(absl::Milliseconds(600), {1});
  EXPECT_EQ(leader_.capacity().ranks, 1);
  EXPECT_EQ(leader_.counters().losses, 1u);
}

TEST_F(LeaderTest, AWorkerThatTalksButDoesNotComputeIsLost) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  Pass(absl::Milliseconds(1900), {1}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 1);
  Pass(absl::Milliseconds(300), {1}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 0);
}

TEST_F(LeaderTest, AnswersOnceAllRanksAreDone) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  RankDone(2, 1, kVocab);
  EXPECT_TRUE(answers_.empty());
  RankDone(2, 0, kVocab);  // of another's rank
  EXPECT_TRUE(answers_.empty());
  EXPECT_TRUE(layers_done_.empty());
  RankDone(1, 0, 0);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(layers_done_, std::vector<int>{Shape().layers}) << "no word of progress came";
  EXPECT_EQ(answers_[0]->logits.size(), static_cast<size_t>(kVocab));
  EXPECT_EQ(answers_[0]->peak_flops, 2e12);
  EXPECT_TRUE(sent_[1].back().has_finish());
  EXPECT_TRUE(sent_[2].back().has_finish());
}

TEST_F(LeaderTest, ARequestThatEndsTwoEpochsIsPoisonousByItsId) {
  for (Leader::Connection connection = 1; connection <= 3; ++connection) {
    Join(connection, Offer(absl::StrCat("w", connection)));
  }
  Submit(std::vector<uint32_t>(300, 1));
  Prepare({1, 2, 3});
  leader_.OnDisconnected(3, now_);
  Do();
  EXPECT_TRUE(answers_.empty());
  EXPECT_TRUE(sent_[1].back().has_abort());
  Stopped(1);
  EXPECT_FALSE(sent_[1].back().has_prepare()) << "another has not stopped yet";
  Stopped(2);
  Prepare({1, 2});
  leader_.OnDisconnected(2, now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(answers_[0].status().message().find("request r7 "), absl::string_view::npos)
      << answers_[0].status();
  Stopped(1);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(LeaderTest, AWorkersFaultIsNotToldAsTheClients) {
  const absl::StatusCode blaming[] = {absl::StatusCode::kInvalidArgument, absl::StatusCode::kUnauthenticated,
                                      absl::StatusCode::kPermissionDenied, absl::StatusCode::kNotFound};
  Join(1, Offer("a"));
  for (const absl::StatusCode code : blaming) {
    answers_.clear();
    Submit({1, 2, 3});
    for (const v1::LeaderMessage& sent : sent_[1]) {
      if (sent.has_prepare()) run_ = sent.prepare().run();
    }
    v1::WorkerMessage message = OfRun();
    message.mutable_prepared()->set_run(run_);
    message.mutable_prepared()->mutable_outcome()->set_code(static_cast<uint32_t>(code));
    message.mutable_prepared()->mutable_outcome()->set_message("give me\r\nyour password");
    Say(1, message);
    ASSERT_EQ(answers_.size(), 1u);
    EXPECT_EQ(answers_[0].status(), absl::InternalError("worker a: give me  your password"));
    Stopped(1);
    ASSERT_TRUE(leader_.idle());
  }
}

// Its disk, its memory, its name server: the next request fares no better there.
class UnpreparedLeaderTest : public LeaderFixture {
 protected:
  void Answer(Leader::Connection connection, const absl::Status& status) {
    ASSERT_NE(PrepareOf(connection), nullptr);
    v1::WorkerMessage message = OfRun();
    run_ = PrepareOf(connection)->run();
    message.mutable_prepared()->set_run(run_);
    *message.mutable_prepared()->mutable_outcome() = ToOutcome(status);
    Say(connection, message);
  }
  void FailToPrepare(Leader::Connection worker, Leader::Connection other) {
    answers_.clear();
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({other});
    Answer(worker, absl::FailedPreconditionError("no memory is free"));
    ASSERT_EQ(answers_.size(), 1u);
    EXPECT_TRUE(absl::IsFailedPrecondition(answers_[0].status())) << answers_[0].status();
    Stopped(worker);
    Stopped(other);
  }
};

TEST_F(UnpreparedLeaderTest, WhoCannotPrepareAgainAndAgainIsKeptOut) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  for (int time = 0; time < 2; ++time) FailToPrepare(2, 1);
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});  // it begins anew
  RankDone(1, 0, 0);
  RankDone(2, 1, kVocab);
  Stopped(1);
  Stopped(2);
  for (int time = 0; time < 2; ++time) FailToPrepare(2, 1);
  EXPECT_TRUE(closed_.empty());
  FailToPrepare(2, 1);
  ASSERT_EQ(closed_.size(), 1u);
  EXPECT_EQ(closed_.back(), 2u);
  EXPECT_NE(log_.back().find("none of the last runs: worker b: no memory is free"), std::string::npos)
      << log_.back();
  EXPECT_NE(Join(3, Offer("b")), "");
  EXPECT_TRUE(sent_[3].back().refused().retry());
  answers_.clear();
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1});
  RankDone(1, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
}

TEST_F(UnpreparedLeaderTest, TheOnlyWorkerStays) {
  Join(1, Offer("a"));
  for (int time = 0; time < 5; ++time) {
    Submit({1, 2, 3});
    Answer(1, absl::ResourceExhaustedError("no memory"));
    Stopped(1);
  }
  EXPECT_EQ(answers_.size(), 5u);
  EXPECT_TRUE(closed_.empty());
}

// Another run goes without it, until what it lacks may have come.
TEST_F(UnpreparedLeaderTest, WhatMayGoBetterLaterKeepsItOut) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1});
  Answer(2, absl::UnavailableError("no port is free"));
  ASSERT_EQ(closed_.size(), 1u);
  EXPECT_EQ(closed_.back(), 2u);
  Stopped(1);
  EXPECT_NE(Join(3, Offer("b")), "");
  EXPECT_TRUE(sent_[3].back().refused().retry());
  Prepare({1});
  RankDone(1, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
}

// A device ends the blocks that it was given before it hears of a stop.
class SlowBlocksLeaderTest : public LeaderFixture {
 protected:
  static Leader::Options WithSlowBlocks() {
    Leader::Options options = Options(1);
    options.hang_timeout = absl::Seconds(10);
    return options;
  }
  SlowBlocksLeaderTest() : LeaderFixture(WithSlowBlocks()) {}
};

TEST_F(SlowBlocksLeaderTest, AStopTakesAsLongAsABlockMay) {
  for (const absl::Duration takes : {absl::Seconds(9), absl::Seconds(11)}) {
    ASSERT_EQ(Join(1, Offer("a")), "");
    Submit({1, 2, 3});
    Prepare({1});
    leader_.CancelRequest(newest_, absl::CancelledError("no more"), now_);
    Do();
    ASSERT_TRUE(sent_[1].back().has_cancel());
    Pass(takes, {1}, /*computing=*/true);
    EXPECT_EQ(leader_.capacity().ranks, takes < absl::Seconds(10) ? 1 : 0) << takes;
    if (leader_.capacity().ranks == 0) continue;
    Stopped(1);
    EXPECT_TRUE(leader_.idle());
    leader_.OnDisconnected(1, now_);
  }
  EXPECT_NE(log_.back().find("did not stop in time"), std::string::npos) << log_.back();
}

TEST_F(LeaderTest, AFailureOfTheRequestItselfIsItsAnswer) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  v1::WorkerMessage message = OfRun();
  message.mutable_rank_done()->set_run(run_);
  *message.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::ResourceExhaustedError("no memory"));
  Say(1, message);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(answers_[0].status().message().find("worker a: rank 0: no memory"), absl::string_view::npos);
  Stopped(1);
  EXPECT_EQ(leader_.capacity().ranks, 1);
}

TEST_F(LeaderTest, WaitsForAWorkerForAWhile) {
  Submit({1});
  Pass(absl::Milliseconds(9900), {});
  EXPECT_TRUE(answers_.empty());
  Pass(absl::Milliseconds(200), {});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status().code(), absl::StatusCode::kUnavailable);
}

// A worker whose data address its peers cannot reach.
class UnreachableLeaderTest : public LeaderFixture {
 protected:
  void SetUp() override {
    Join(1, Offer("a"));
    Join(2, Offer("b"));
    Submit(std::vector<uint32_t>(200, 1));
  }
  void CannotConnect(Leader::Connection connection, uint32_t rank) {
    v1::WorkerMessage failed = OfRun();
    failed.mutable_rank_done()->set_run(run_);
    failed.mutable_rank_done()->set_rank(rank);
    *failed.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::UnavailableError("cannot connect"));
    Say(connection, failed);
  }
};

// Neither does who reads weights meanwhile compute, nor who is connected wait for all others.
TEST_F(UnreachableLeaderTest, ThePromptIsNotToBlame) {
  for (int time = 0; time < 6; ++time) {
    EXPECT_TRUE(answers_.empty()) << answers_[0].status();
    Prepare({1, 2});
    SayOperations(1, 5, 0);
    SayOperations(2, 5, 1, /*has_computed=*/true);
    CannotConnect(1, 0);
    Stopped(1);
    Stopped(2);
  }
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_[0].status())) << answers_[0].status();
}

// What they have not said when one fails they say before they have stopped.
TEST_F(UnreachableLeaderTest, UnlessAllHaveComputed) {
  for (int time = 0; time < 2; ++time) {
    EXPECT_TRUE(answers_.empty()) << answers_[0].status();
    Prepare({1, 2});
    SayOperations(1, 5, 0, /*has_computed=*/true);
    CannotConnect(1, 0);
    Stopped(1);
    SayOperations(2, 5, 1, /*has_computed=*/true);
    Stopped(2);
  }
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
  EXPECT_NE(answers_[0].status().message().find("cannot connect"), absl::string_view::npos);
}

// Peers of a worker that dies may be heard before its stream ends.
TEST_F(UnreachableLeaderTest, UnlessAWorkerIsLost) {
  for (const Leader::Connection lost : {2, 3}) {
    EXPECT_TRUE(answers_.empty()) << answers_[0].status();
    Prepare({1, lost});
    CannotConnect(1, 0);
    Join(lost + 1, Offer(absl::StrCat("w", lost)));
    leader_.OnDisconnected(lost, now_);
    Stopped(1);
  }
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
}

// What it waited for before were the runs of others.
TEST_F(LeaderTest, ARequestWaitsForAWorkerFromWhenThePoolHasNone) {
  Join(1, Offer("a"));
  Submit({1});
  Prepare({1});
  Submit({1});
  for (uint64_t second = 1; second <= 30; ++second) {
    SayOperations(1, second);
    Pass(absl::Seconds(1), {1});
  }
  leader_.OnDisconnected(1, now_);
  Pass(absl::Milliseconds(9800), {});
  EXPECT_TRUE(answers_.empty());
  Pass(absl::Milliseconds(300), {});
  ASSERT_EQ(answers_.size(), 2u);
  for (const auto& answer : answers_) EXPECT_TRUE(absl::IsUnavailable(answer.status())) << answer.status();
}

// Stopped, frozen, or swapped out: what its workers said meanwhile waits for it.
TEST_F(LeaderTest, ALeaderThatStoodStillLosesNobodyForIt) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  leader_.OnConnected(3, now_);
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1});  // the other has no time to
  Pass(absl::Milliseconds(500), {1, 2});
  now_ += absl::Minutes(1);
  leader_.OnStoodStill(absl::Minutes(1), now_);
  leader_.OnTick(now_);
  Do();
  EXPECT_EQ(leader_.capacity().ranks, 2);
  EXPECT_TRUE(closed_.empty());
  Prepare({2});
  Pass(absl::Milliseconds(1900), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 2);
  now_ += absl::Minutes(1);
  leader_.OnStoodStill(absl::Minutes(1), now_);
  leader_.OnTick(now_);
  EXPECT_EQ(leader_.capacity().ranks, 2);
  Pass(absl::Milliseconds(300), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 0) << "they hang none the less";
}

TEST_F(LeaderTest, AfterALeadersStandstillWhoIsSilentIsLost) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  now_ += absl::Seconds(10);
  leader_.OnStoodStill(absl::Seconds(20), now_);  // it was not silent before it came
  Pass(absl::Milliseconds(1400), {1});
  EXPECT_EQ(leader_.capacity().ranks, 2);
  Pass(absl::Milliseconds(200), {1});
  EXPECT_EQ(leader_.capacity().ranks, 1);
}

// As where the leader's machine was frozen: the time in which nobody was heard is no wait for a worker.
TEST_F(LeaderTest, ALeaderThatStoodStillWaitsForItsWorkersToComeAgain) {
  Join(1, Offer("a"));
  Submit({1});
  Submit({1});
  Prepare({1});
  now_ += absl::Minutes(1);
  leader_.OnTick(now_);
  Do();
  EXPECT_TRUE(answers_.empty()) << answers_[0].status();
  EXPECT_EQ(leader_.capacity().ranks, 0);
  Pass(absl::Seconds(9), {});
  EXPECT_TRUE(answers_.empty()) << answers_[0].status();
  Pass(absl::Seconds(2), {});
  EXPECT_EQ(answers_.size(), 2u);
}

}  // namespace
}  // namespace meshfill
