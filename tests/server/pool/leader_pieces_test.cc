// Prompts in pieces: each runs behind those before it, whatever is lost or drains between them, and
// there is room for K and V of all.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

// Two workers whose memory takes a prompt of 4,096 tokens in pieces alone.
class PiecesLeaderTest : public LeaderFixture {
 protected:
  static constexpr int64_t kTokens = 4096;
  static constexpr int64_t kTokenBytes = 2 * 2 * 8 * 8 * 4;  // 2 layers, K and V, 8 heads of 8, f32

  explicit PiecesLeaderTest(int64_t kv_tokens = 2 * kTokens) : kv_tokens_(kv_tokens) {}

  v1::Join SmallOffer(const std::string& name) const {
    const auto whole = PlanForPool(Shape(), EngineOptions(), {.ranks = 2}, kTokens, {});
    EXPECT_TRUE(whole.ok()) << whole.status();
    v1::Join offer = Offer(name);
    offer.set_memory_bytes(static_cast<uint64_t>(whole->plan.predicted.run_bytes * 3 / 10));
    offer.set_kv_memory_bytes(static_cast<uint64_t>(kv_tokens_ * kTokenBytes));
    return offer;
  }
  void SetUp() override {
    for (const Leader::Connection worker : {1, 2}) {
      ASSERT_EQ(Join(worker, SmallOffer(absl::StrCat("w", worker))), "");
    }
  }
  void SubmitPrompt(const std::string& lease = "") {
    tokens_ = std::vector<uint32_t>(kTokens, 1);
    ticket_ = leader_.Submit({.id = "r", .tokens = tokens_, .options = {.kv_lease = lease}}, now_);
    Do();
  }
  const v1::Prepare& LastPrepare(Leader::Connection worker) {
    const v1::Prepare* last = nullptr;
    for (const v1::LeaderMessage& message : sent_[worker]) {
      if (message.has_prepare()) last = &message.prepare();
    }
    EXPECT_NE(last, nullptr);
    return *last;
  }
  // The present run of two workers is done. Whether it was the prompt's last.
  bool RunPiece(const std::vector<Leader::Connection>& workers) {
    Prepare(workers);
    const bool last = !LastPrepare(workers[0]).more_pieces();
    RankDone(workers[0], 0, 0);
    RankDone(workers[1], 1, last ? kVocab : 0);
    return last;
  }
  // Runs whose K and V the worker was told to drop.
  std::vector<uint64_t> Dropped(Leader::Connection worker) {
    std::vector<uint64_t> runs;
    for (const v1::LeaderMessage& message : sent_[worker]) {
      if (message.has_kv_run_ends()) runs.push_back(message.kv_run_ends().run());
    }
    std::sort(runs.begin(), runs.end());
    return runs;
  }
  bool Has(Leader::Connection worker, v1::LeaderMessage::BodyCase body) {
    return std::any_of(sent_[worker].begin(), sent_[worker].end(),
                       [body](const v1::LeaderMessage& message) { return message.body_case() == body; });
  }
  absl::Status Admit(const std::string& lease, int64_t tokens) {
    const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), tokens, {});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return leader_.AdmitKv({.lease = lease, .tenant = "", .tokens = tokens, .lasts = absl::Hours(1)},
                           choice->plan);
  }

  const int64_t kv_tokens_;  // that a worker has room for
  Leader::Ticket ticket_ = 0;
};

TEST_F(PiecesLeaderTest, RunsOnePieceAfterTheOtherBehindThoseBefore) {
  SubmitPrompt();
  const int64_t all_bytes = kTokens * kTokenBytes;
  std::vector<uint64_t> runs;
  int64_t tokens = 0;
  uint64_t reserve_bytes = 0;
  for (bool last = false; !last;) {
    const v1::Prepare prepare = LastPrepare(1);
    ASSERT_EQ(static_cast<size_t>(prepare.prefix_size()), runs.size());
    EXPECT_EQ(prepare.plan().cached_tokens(), static_cast<uint64_t>(tokens));
    for (int i = 0; i < prepare.prefix_size(); ++i) EXPECT_EQ(prepare.prefix(i).run(), runs[i]);
    EXPECT_EQ(prepare.keep_kv().cache(), prepare.more_pieces());
    EXPECT_EQ(prepare.reserve_bytes(), LastPrepare(2).reserve_bytes());
    if (reserve_bytes == 0) reserve_bytes = prepare.reserve_bytes();
    EXPECT_EQ(prepare.reserve_bytes(), reserve_bytes) << "as much as the largest: nobody else takes the rest";
    if (prepare.more_pieces()) {
      EXPECT_EQ(leader_.kv_counts().bytes, all_bytes) << "room for all is held";
    }
    runs.push_back(prepare.run());
    tokens += static_cast<int64_t>(prepare.plan().tokens());
    now_ += absl::Seconds(1);
    last = RunPiece({1, 2});
  }
  EXPECT_EQ(tokens, kTokens);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_GT(runs.size(), 1u);
  EXPECT_EQ(answers_[0]->pieces, std::ssize(runs));
  EXPECT_EQ(answers_[0]->piece_tokens * (std::ssize(runs) - 1) + answers_[0]->plan.layout.tokens(), kTokens);
  EXPECT_EQ(answers_[0]->cached_tokens, 0);
  EXPECT_EQ(answers_[0]->attempts, 1);
  EXPECT_EQ(answers_[0]->lost_seconds, 0);
  EXPECT_EQ(answers_[0]->seconds, std::ssize(runs)) << "of all pieces";
  EXPECT_EQ(layers_done_.back(), 2 * std::ssize(runs));
  EXPECT_EQ(layers_of_, layers_done_.back());
  EXPECT_TRUE(std::is_sorted(layers_done_.begin(), layers_done_.end()));
  EXPECT_EQ(leader_.counters().retries, 0u);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
  runs.pop_back();  // it kept nothing
  EXPECT_EQ(Dropped(1), runs);
  EXPECT_EQ(Dropped(2), runs);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(PiecesLeaderTest, APieceThatFailsRunsAgainBehindTheOthers) {
  SubmitPrompt();
  now_ += absl::Milliseconds(500);
  EXPECT_FALSE(RunPiece({1, 2}));
  Prepare({1, 2});
  const uint64_t before = LastPrepare(1).plan().cached_tokens();
  const uint64_t failed = run_;
  now_ += absl::Milliseconds(250);
  v1::WorkerMessage message = OfRun();
  message.mutable_rank_done()->set_run(run_);
  *message.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::UnavailableError("a cable"));
  Say(1, message);
  EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes) << "nobody else gets its room";
  Stopped(1);
  Stopped(2);
  EXPECT_GT(LastPrepare(1).run(), failed);
  EXPECT_EQ(LastPrepare(1).plan().cached_tokens(), before);
  while (!RunPiece({1, 2})) {
  }
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 2);
  EXPECT_NEAR(answers_[0]->lost_seconds, 0.25, 1e-9) << "the first piece is not lost";
  EXPECT_EQ(leader_.counters().retries, 1u);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
}

TEST_F(PiecesLeaderTest, ALostWorkerTakesWhatItHasOfThePieces) {
  SubmitPrompt();
  const uint64_t first = LastPrepare(1).run();
  EXPECT_FALSE(RunPiece({1, 2}));
  ASSERT_EQ(Join(3, SmallOffer("w3")), "");
  Prepare({1, 2});
  leader_.OnDisconnected(2, now_);
  Do();
  Stopped(1);
  EXPECT_EQ(Dropped(1), std::vector<uint64_t>{first});
  EXPECT_EQ(LastPrepare(1).plan().cached_tokens(), 0u);
  while (!RunPiece({1, 3})) {
  }
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 2);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
}

// Two losses in one piece are at one place of the prompt; in two that adjoin they are not.
TEST_F(PiecesLeaderTest, LossesInTwoPiecesAreAtTwoPlaces) {
  Leader::Connection second = 2;
  const auto lose_second = [&] {
    Prepare({1, second});
    SayOperations(1, 1, 0, /*has_computed=*/true);
    SayOperations(second, 1, 1, /*has_computed=*/true);
    ASSERT_EQ(Join(second + 1, SmallOffer(absl::StrCat("w", second + 1))), "");
    leader_.OnDisconnected(second, now_);
    Do();
    Stopped(1);
    ++second;
  };
  for (const bool in_one_piece : {false, true}) {
    answers_.clear();
    SubmitPrompt();
    lose_second();
    if (!in_one_piece) EXPECT_FALSE(RunPiece({1, second}));
    lose_second();
    if (in_one_piece) {
      ASSERT_EQ(answers_.size(), 1u);
      EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
      continue;
    }
    ASSERT_TRUE(answers_.empty()) << answers_[0].status();
    while (!RunPiece({1, second})) {
    }
    ASSERT_EQ(answers_.size(), 1u);
    EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  }
}

// A turn that ends between two pieces: the request holds K and V, and no memory of the activations.
TEST_F(PiecesLeaderTest, BetweenTwoPiecesItWaitsIsLostOrIsCancelled) {
  for (const bool lost : {false, true}) {
    SubmitPrompt();
    const uint64_t first = LastPrepare(1).run();
    Prepare({1, 2});
    leader_.SetPaused(ticket_, true, now_);
    Do();
    RankDone(1, 0, 0);  // it was done before it heard
    RankDone(2, 1, 0);
    EXPECT_EQ(leader_.run_of(ticket_), 0u);
    EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes);
    Pass(absl::Seconds(20), {1, 2});
    if (lost) {
      leader_.OnDisconnected(2, now_);
      Do();
      EXPECT_EQ(leader_.kv_counts().bytes, 0);
      EXPECT_EQ(leader_.counters().retries, 0u) << "nothing runs";
      ASSERT_EQ(Join(3, SmallOffer("w3")), "");
      leader_.SetPaused(ticket_, false, now_);
      Do();
      EXPECT_EQ(LastPrepare(3).plan().cached_tokens(), 0u);
      while (!RunPiece({1, 3})) {
      }
      ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
      EXPECT_EQ(answers_.back()->attempts, 2);
      EXPECT_NEAR(answers_.back()->paused_seconds, 20, 0.1);
    } else {
      leader_.CancelRequest(ticket_, absl::CancelledError("the client left"), now_);
      Do();
      EXPECT_TRUE(absl::IsCancelled(answers_.back().status()));
    }
    EXPECT_EQ(leader_.kv_counts().bytes, 0);
    const std::vector<uint64_t> dropped = Dropped(1);
    EXPECT_TRUE(std::find(dropped.begin(), dropped.end(), first) != dropped.end());
    EXPECT_TRUE(leader_.idle());
  }
  EXPECT_EQ(answers_.size(), 2u);
}

TEST_F(PiecesLeaderTest, WorkersThatDrainStayForAllPiecesAndOthersThatJoinWait) {
  SubmitPrompt();
  EXPECT_FALSE(RunPiece({1, 2}));
  ASSERT_EQ(Join(3, SmallOffer("w3")), "");
  v1::WorkerMessage leave = OfRun();
  leave.mutable_leave();
  Say(1, leave);
  Say(2, leave);
  while (!RunPiece({1, 2})) {
    EXPECT_FALSE(Has(2, v1::LeaderMessage::kGoodbye));
  }
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 1);
  EXPECT_FALSE(Has(3, v1::LeaderMessage::kPrepare));
  EXPECT_TRUE(Has(1, v1::LeaderMessage::kGoodbye));
  EXPECT_TRUE(Has(2, v1::LeaderMessage::kGoodbye));
}

TEST_F(PiecesLeaderTest, TheLeaseIsOfTheLastPieceAndHasAll) {
  ASSERT_TRUE(Admit("lease", kTokens).ok());
  SubmitPrompt("lease");
  std::vector<uint64_t> runs;
  for (bool last = false; !last;) {
    EXPECT_EQ(leader_.kv().Find("lease", "", now_)->run, 0u) << "not yet";
    const v1::Prepare prepare = LastPrepare(1);
    runs.push_back(prepare.run());
    EXPECT_EQ(prepare.keep_kv().lease(), prepare.more_pieces() ? "" : "lease");
    EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes);
    last = RunPiece({1, 2});
  }
  ASSERT_TRUE(answers_.at(0).ok()) << answers_[0].status();
  const auto view = leader_.kv().Find("lease", "", now_);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->run, runs.back());
  EXPECT_EQ(view->layers_done, 2);
  EXPECT_EQ(leader_.kv().PlaceOf("lease").layout.tokens(), kTokens);
  EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes);
  EXPECT_TRUE(Dropped(1).empty());
  leader_.kv().End("lease");
  Do();
  runs.pop_back();
  EXPECT_EQ(Dropped(1), runs);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
}

class TightKvPiecesLeaderTest : public PiecesLeaderTest {
 protected:
  TightKvPiecesLeaderTest() : PiecesLeaderTest(kTokens / 2 + 300) {}
};

TEST_F(TightKvPiecesLeaderTest, NobodyGetsTheRoomOfPiecesToCome) {
  SubmitPrompt();
  EXPECT_FALSE(RunPiece({1, 2}));
  EXPECT_TRUE(absl::IsResourceExhausted(Admit("greedy", 1024)));
  EXPECT_TRUE(Admit("modest", 512).ok());
  while (!RunPiece({1, 2})) {
  }
  ASSERT_TRUE(answers_.at(0).ok()) << answers_[0].status();
  EXPECT_TRUE(Admit("greedy", 1024).ok());
  SubmitPrompt();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsResourceExhausted(answers_[1].status())) << answers_[1].status();
}

TEST_F(TightKvPiecesLeaderTest, WhatNoWorkerCouldKeepIsRefused) {
  const auto refused = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), kTokens + 1024, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("K and V take"), absl::string_view::npos) << refused.status();
}

// Two workers whose memory takes the prompt whole, and beside the room for short ones in pieces.
class WholeOrPiecesLeaderTest : public PiecesLeaderTest {
 protected:
  WholeOrPiecesLeaderTest() : PiecesLeaderTest(kTokens / 2 + 300) {}

  void SetUp() override {
    const auto whole = PlanForPool(Shape(), EngineOptions(), {.ranks = 2}, kTokens, {});
    ASSERT_TRUE(whole.ok()) << whole.status();
    const int64_t bytes = (whole->plan.predicted.run_bytes + 1) / 2;
    for (const Leader::Connection worker : {1, 2}) {
      v1::Join offer = SmallOffer(absl::StrCat("w", worker));
      offer.set_memory_bytes(static_cast<uint64_t>(bytes));
      ASSERT_EQ(Join(worker, offer), "");
    }
    leader_.LeaveToShort(bytes * 4 / 10);
  }
};

TEST_F(WholeOrPiecesLeaderTest, LeasesThatHoldTheRoomOfPiecesMakeItWhole) {
  for (const bool leased : {false, true}) {
    if (leased) {
      ASSERT_TRUE(Admit("greedy", 1024).ok());
    }
    SubmitPrompt();
    EXPECT_EQ(LastPrepare(1).more_pieces(), !leased);
    while (!RunPiece({1, 2})) {
    }
    ASSERT_EQ(answers_.size(), leased ? 2u : 1u);
    EXPECT_TRUE(answers_.back().ok()) << answers_.back().status();
  }
}

}  // namespace
}  // namespace meshfill
