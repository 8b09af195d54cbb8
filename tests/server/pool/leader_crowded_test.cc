// More requests than the workers have memory for: which begin beside others, and which wait for memory.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/kv/block_hash.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

// Workers whose memory takes one prefill of 4,096 tokens, and small ones beside it.
class CrowdedLeaderTest : public LeaderFixture {
 protected:
  CrowdedLeaderTest() : LeaderFixture(Options(8)) {}

  void SetUp() override {
    const auto plan = PlanForPool(Shape(), EngineOptions(), {.ranks = 2}, 4096, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const Leader::Connection worker : {1, 2}) {
      v1::Join offer = Offer(absl::StrCat("w", worker));
      offer.set_memory_bytes(static_cast<uint64_t>(plan->plan.predicted.run_bytes * 6 / 10));
      ASSERT_EQ(Join(worker, offer), "");
    }
  }
  Leader::Ticket SubmitTokens(size_t tokens) {
    Submit(std::vector<uint32_t>(tokens, 1));
    submitted_at_ = now_;
    return newest_;
  }
  // The newest one.
  bool Undecided(Leader::Ticket ticket) { return leader_.Undecided(ticket, submitted_at_, now_); }

  absl::Time submitted_at_;
};

TEST_F(CrowdedLeaderTest, BeginsBesideOthersWhatTheWorkersHaveMemoryFor) {
  const Leader::Ticket large = SubmitTokens(4096);
  EXPECT_NE(leader_.run_of(large), 0u);
  const Leader::Ticket small = SubmitTokens(64);
  EXPECT_NE(leader_.run_of(small), 0u);
  EXPECT_FALSE(leader_.CrowdedOut(small));
  const Leader::Ticket other = SubmitTokens(4096);
  EXPECT_EQ(leader_.run_of(other), 0u);
  EXPECT_TRUE(leader_.CrowdedOut(other));
  const size_t planned = planned_with_.size();
  Pass(absl::Seconds(3), {1, 2});
  EXPECT_EQ(planned_with_.size(), planned) << "nothing has changed: no need to plan again";
  leader_.CancelRequest(large, absl::CancelledError("the client left"), now_);
  Do();
  submitted_at_ = now_;
  EXPECT_TRUE(Undecided(other)) << "a run stops: it may have room in a moment";
  EXPECT_EQ(leader_.run_of(other), 0u) << "not before its memory is free";
  run_ = 1;
  Stopped(1);
  EXPECT_EQ(leader_.run_of(other), 0u);
  Stopped(2);
  EXPECT_NE(leader_.run_of(other), 0u);
  EXPECT_FALSE(leader_.CrowdedOut(other));
}

TEST_F(CrowdedLeaderTest, LongPromptsLeaveRoomToShortOnes) {
  const auto of = [](int64_t tokens) {
    return PlanForPool(Shape(), EngineOptions(), {.ranks = 2}, tokens, {})->plan.predicted.run_bytes;
  };
  const int64_t room = of(64) / 2;
  leader_.LeaveToShort(room);
  EXPECT_EQ(leader_.MostRankBytes(), of(4096) * 6 / 10);
  const Leader::Ticket large = SubmitTokens(4096);
  ASSERT_NE(leader_.run_of(large), 0u);
  const int64_t left = of(4096) * 6 / 10 - of(4096) / 2;
  EXPECT_NEAR(static_cast<double>(leader_.MostRankBytes()), static_cast<double>(std::max(room, left - room)),
              1);
  // The longest that would have room beside it, were none left to short ones.
  size_t tokens = 64;
  while (of(static_cast<int64_t>(tokens) + 64) / 2 < left) tokens += 64;
  ASSERT_GT(of(static_cast<int64_t>(tokens)) / 2 + room, left);
  const Leader::Ticket middling = SubmitTokens(tokens);
  EXPECT_TRUE(leader_.CrowdedOut(middling));
  leader_.CancelRequest(middling, absl::CancelledError("put back"), now_);
  Do();
  const Leader::Ticket small = SubmitTokens(64);
  EXPECT_NE(leader_.run_of(small), 0u);
}

// Also on those of which a long run has no part.
TEST_F(CrowdedLeaderTest, LongPromptsLeaveRoomOnAllRanksOfAWorker) {
  constexpr int64_t kTokens = 64;
  constexpr uint32_t kRanks = 4;
  const PoolSpeed fast = {.gemm_flops_per_second = 1e15, .attention_flops_per_second = 1e15};
  for (const Leader::Connection worker : {1, 2}) leader_.OnDisconnected(worker, now_);
  const auto plan = PlanForPool(Shape(), EngineOptions(), {.ranks = kRanks, .speed = fast}, kTokens, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_LT(plan->plan.ranks(), kRanks);
  const int64_t run_bytes = plan->plan.predicted.run_bytes, short_rank_bytes = run_bytes / 4;
  v1::Join offer = Offer("w", kRanks);
  *offer.mutable_speed() = ToProto(fast);
  offer.set_memory_bytes(static_cast<uint64_t>(4 * run_bytes + kRanks * short_rank_bytes - 1));
  ASSERT_EQ(Join(3, offer), "");
  leader_.LeaveToShort(short_rank_bytes);
  for (int i = 0; i < 3; ++i) EXPECT_NE(leader_.run_of(SubmitTokens(kTokens)), 0u) << i;
  EXPECT_TRUE(leader_.CrowdedOut(SubmitTokens(kTokens))) << "it lacks a byte";
}

TEST_F(CrowdedLeaderTest, WhatStopsMayLeaveTooLittleRoom) {
  const Leader::Ticket large = SubmitTokens(4096);
  const Leader::Ticket small = SubmitTokens(64);
  ASSERT_NE(leader_.run_of(small), 0u);
  leader_.CancelRequest(small, absl::CancelledError("the client left"), now_);
  Do();
  const Leader::Ticket other = SubmitTokens(4096);
  EXPECT_TRUE(Undecided(other));
  run_ = 2;
  Stopped(1);
  EXPECT_TRUE(Undecided(other));
  Stopped(2);
  EXPECT_FALSE(Undecided(other));
  EXPECT_TRUE(leader_.CrowdedOut(other)) << "the first still has its memory";
  leader_.CancelRequest(large, absl::CancelledError("the client left"), now_);
  Do();
  run_ = 1;
  Stopped(1);
  Stopped(2);
  EXPECT_NE(leader_.run_of(other), 0u);
}

// One run after the other is stopped, so that some run stops at each moment.
TEST_F(CrowdedLeaderTest, TheWaitForWhatStopsEnds) {
  SubmitTokens(4096);
  std::vector<Leader::Ticket> small;
  for (int i = 0; i < 4; ++i) small.push_back(SubmitTokens(64));
  const Leader::Ticket other = SubmitTokens(4096);
  const absl::Time since = now_;
  for (size_t i = 0; i < small.size(); ++i) {
    leader_.CancelRequest(small[i], absl::CancelledError("the client left"), now_);
    Do();
    Pass(absl::Milliseconds(750), {1, 2});
    ASSERT_TRUE(leader_.MakesRoom());
    EXPECT_EQ(Undecided(other), now_ - since < absl::Seconds(3)) << now_ - since;
    EXPECT_EQ(leader_.MayGetRoom(since, now_), now_ - since < absl::Seconds(3)) << "as long for a pack";
    if (i + 1 == small.size()) break;
    run_ = i + 2;
    Stopped(1);
    Stopped(2);
  }
  EXPECT_TRUE(leader_.CrowdedOut(other));
}

TEST_F(CrowdedLeaderTest, TheOnlyOneTakesTheRoomOfWhatStops) {
  const Leader::Ticket first = SubmitTokens(4096);
  leader_.CancelRequest(first, absl::CancelledError("the client left"), now_);
  Do();
  const Leader::Ticket second = SubmitTokens(4096);
  EXPECT_EQ(leader_.run_of(second), 0u);
  EXPECT_FALSE(leader_.CrowdedOut(second)) << "nothing is left to decide: whoever waits may withdraw it";
  const Leader::Ticket third = SubmitTokens(4096);
  EXPECT_TRUE(Undecided(third)) << "the second one may leave it no room";
  run_ = 1;
  Stopped(1);
  Stopped(2);
  EXPECT_NE(leader_.run_of(second), 0u);
  EXPECT_TRUE(leader_.CrowdedOut(third));
}

TEST_F(CrowdedLeaderTest, RunsThatStandStillGoOnWhileAnotherWaitsForTheirMemory) {
  const Leader::Ticket large = SubmitTokens(4096);
  Prepare({1, 2});
  const uint64_t first = run_;
  leader_.SetPaused(large, true, now_);
  Do();
  ASSERT_TRUE(sent_[1].back().has_pause());
  const Leader::Ticket other = SubmitTokens(4096);
  EXPECT_TRUE(leader_.CrowdedOut(other));
  EXPECT_EQ(sent_[1].back().resume().run(), first);
  leader_.CancelRequest(other, absl::CancelledError("later"), now_);
  Do();
  EXPECT_TRUE(sent_[1].back().has_pause());
}

class SharingCrowdLeaderTest : public CrowdedLeaderTest {
 protected:
  void SetUp() override {}  // other workers join
};

// Two runs share the same shares of the weights, whose memory is counted once.
TEST_F(SharingCrowdLeaderTest, TheSharesOfRunsThatLiveTakeMemory) {
  constexpr int64_t kShareBytes = 1500;
  int64_t run_bytes = 0;
  Leader::Connection worker = 0;
  for (const int64_t slack : {1 << 30, -1, 0}) {
    SCOPED_TRACE(slack);
    for (int i = 0; i < 2; ++i) {
      const int64_t memory_bytes = 2 * run_bytes + kShareBytes + slack;
      ++worker;
      ASSERT_EQ(Join(worker, StreamingOffer(absl::StrCat("w", worker), memory_bytes)), "");
    }
    const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), 4096, {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->weights.mode, WeightMode::kSharded);
    EXPECT_TRUE(choice->pieces.empty());
    run_bytes = ReservedBytes(choice->plan, 1);
    const Leader::Ticket first = SubmitTokens(4096), second = SubmitTokens(4096);
    EXPECT_NE(leader_.run_of(first), 0u);
    EXPECT_EQ(leader_.run_of(second) != 0, slack >= 0);
    for (const Leader::Ticket ticket : {first, second}) {
      leader_.CancelRequest(ticket, absl::CancelledError("enough"), now_);
    }
    Do();
    for (const Leader::Connection each : {worker - 1, worker}) leader_.OnDisconnected(each, now_);
    Do();
  }
}

// Of sub-meshes, the first to be tried has no memory beside a prefill that stands still there.
class SubmeshesLeaderTest : public LeaderFixture {
 protected:
  SubmeshesLeaderTest() : LeaderFixture(Options(8)) {}

  Leader::Ticket SubmitOnASubmesh() {
    Submit(std::vector<uint32_t>(1024, 1), {.submeshes = 2});
    return newest_;
  }
};

TEST_F(SubmeshesLeaderTest, TakeTheNextOneWhereTheFirstHasNoRoom) {
  const auto plan = PlanForPool(Shape(), EngineOptions(), {.ranks = 1}, 1024, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const auto& [worker, tenths] : {std::pair<Leader::Connection, int64_t>(1, 12), {2, 40}}) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.set_memory_bytes(static_cast<uint64_t>(plan->plan.predicted.run_bytes * tenths / 10));
    ASSERT_EQ(Join(worker, offer), "");
  }
  const Leader::Ticket paused = SubmitOnASubmesh();
  EXPECT_EQ(leader_.PlaceOf(paused), 1u);
  leader_.SetPaused(paused, true, now_);
  EXPECT_EQ(leader_.PlaceOf(SubmitOnASubmesh()), 2u) << "where nothing else is";
  const Leader::Ticket other = SubmitOnASubmesh();
  EXPECT_EQ(leader_.PlaceOf(other), 2u) << "where one computes, but there is room";
  EXPECT_EQ(PrepareOf(1, leader_.run_of(other)), nullptr);
}

// Who has it is slow, and sits behind a fast one that came later.
TEST_F(SubmeshesLeaderTest, PredictsTheWorkersThatHaveWhatIsCached) {
  const auto join = [&](Leader::Connection worker, double gemm_flops) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.set_kv_memory_bytes(1 << 22);
    offer.mutable_speed()->set_gemm_flops_per_second(gemm_flops);
    offer.mutable_speed()->set_attention_flops_per_second(gemm_flops);
    ASSERT_EQ(Join(worker, offer), "");
  };
  join(1, 1e9);
  const std::vector<uint32_t> prompt(1024, 2);
  BlockHasher hasher(/*block_tokens=*/16, "");
  hasher.Append(prompt);
  const PrefillOptions options = {.block_names = std::make_shared<const KvBlockNames>(
                                      KvBlockNames{.tenant = "t", .hashes = hasher.hashes()})};
  EXPECT_EQ(leader_.SitesFor(options).size(), 1u);
  Submit(prompt, options);
  Prepare({1});
  RankDone(1, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_EQ(leader_.SitesFor(options).size(), 1u);
  EXPECT_GT(leader_.SitesFor(options)[0].cached.tokens, 0);
  join(2, 4e9);
  const std::vector<PlanSite> sites = leader_.SitesFor(options);
  ASSERT_EQ(sites.size(), 2u);
  EXPECT_EQ(sites[0].capacity.ranks, 2);
  EXPECT_EQ(sites[0].cached.tokens, 0);
  EXPECT_EQ(sites[1].capacity.ranks, 1);
  EXPECT_EQ(sites[1].capacity.speed.gemm_flops_per_second, 1e9);
  const auto behind =
      PlanForPool(Shape(), EngineOptions(), sites[1].capacity, 1024, options, sites[1].cached);
  ASSERT_TRUE(behind.ok()) << behind.status();
  EXPECT_GT(behind->plan.cached_tokens, 0);
  Submit(prompt, options);
  ASSERT_NE(PrepareOf(1, leader_.run_of(newest_)), nullptr);
  const auto plan = FromRunPlan(PrepareOf(1, leader_.run_of(newest_))->plan());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->cached_tokens, behind->plan.cached_tokens);
  EXPECT_EQ(plan->predicted.seconds, behind->plan.predicted.seconds);
}

// As where a device has a fault for a moment: who follows would have NaN, too.
TEST_F(SubmeshesLeaderTest, CachesNothingWhoseAnswerIsNotFinite) {
  v1::Join offer = Offer("a");
  offer.set_kv_memory_bytes(1 << 22);
  ASSERT_EQ(Join(1, offer), "");
  const std::vector<uint32_t> prompt(1024, 2);
  BlockHasher hasher(/*block_tokens=*/16, "");
  hasher.Append(prompt);
  const PrefillOptions options = {.block_names = std::make_shared<const KvBlockNames>(
                                      KvBlockNames{.tenant = "t", .hashes = hasher.hashes()})};
  for (const bool good : {false, true}) {
    Submit(prompt, options);
    Prepare({1});
    v1::WorkerMessage done = OfRun();
    done.mutable_rank_done()->set_run(run_);
    for (int i = 0; i < kVocab; ++i) done.mutable_rank_done()->add_logits(0);
    if (!good) done.mutable_rank_done()->set_logits(3, std::numeric_limits<float>::quiet_NaN());
    Say(1, done);
    ASSERT_TRUE(answers_.back().ok()) << "the engine says what is wrong";
    const int64_t cached = leader_.SitesFor(options)[0].cached.tokens;
    EXPECT_EQ(cached > 0, good);
    const bool ends = std::any_of(sent_[1].begin(), sent_[1].end(),
                                  [](const auto& sent) { return sent.has_kv_run_ends(); });
    EXPECT_EQ(ends, true) << "the worker drops what is not finite";
    Stopped(1);
  }
}

// Both workers hold it, and have memory for a part of the prompt beside what stands still there.
TEST_F(SubmeshesLeaderTest, WhatIsCachedIsFoundWhereNoneHasRoom) {
  const auto plan = PlanForPool(Shape(), EngineOptions(), {.ranks = 1}, 1024, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const Leader::Connection worker : {1, 2}) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.set_memory_bytes(static_cast<uint64_t>(plan->plan.predicted.run_bytes * 18 / 10));
    offer.set_kv_memory_bytes(1 << 20);
    ASSERT_EQ(Join(worker, offer), "");
  }
  const std::vector<uint32_t> prompt(1024, 2);
  BlockHasher hasher(/*block_tokens=*/16, "");
  hasher.Append(prompt);
  PrefillOptions options;
  options.block_names =
      std::make_shared<const KvBlockNames>(KvBlockNames{.tenant = "t", .hashes = hasher.hashes()});
  Submit(prompt, options);
  Prepare({1, 2});
  RankDone(1, 0, 0);
  RankDone(2, 1, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  for (const Leader::Connection worker : {1, 2}) {
    ASSERT_EQ(leader_.PlaceOf(SubmitOnASubmesh()), worker);
    leader_.SetPaused(newest_, true, now_);
  }
  options.submeshes = 2;
  Submit(prompt, options);
  const uint64_t run = leader_.run_of(newest_);
  for (const Leader::Connection worker : {1, 2}) {
    ASSERT_NE(PrepareOf(worker, run), nullptr);
    EXPECT_GT(PrepareOf(worker, run)->plan().cached_tokens(), 0u);
  }
}

TEST_F(SubmeshesLeaderTest, ArePlannedForTheSmallest) {
  for (const Leader::Connection worker : {1, 2, 3}) {
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
  }
  const int ranks = leader_.capacity().ranks / 3;
  ASSERT_TRUE(leader_.SubmeshCapacity(2).has_value());
  EXPECT_EQ(leader_.SubmeshCapacity(2)->ranks, ranks);
  EXPECT_EQ(leader_.SubmeshCapacity(3)->ranks, ranks);
  EXPECT_FALSE(leader_.SubmeshCapacity(4).has_value());
}

TEST_F(SubmeshesLeaderTest, EachIsAsFastAsItsOwnWorkers) {
  std::vector<double> seconds;  // on the fast one, and on the slow one
  for (const double gemm_flops : {50e9, 5e9}) {
    v1::Join offer = Offer(absl::StrCat("w", gemm_flops));
    offer.mutable_speed()->set_gemm_flops_per_second(gemm_flops);
    ASSERT_EQ(Join(static_cast<Leader::Connection>(seconds.size() + 1), offer), "");
    const PoolCapacity alone = {.ranks = 1, .speed = FromProto(offer.speed())};
    seconds.push_back(PlanForPool(Shape(), EngineOptions(), alone, 1024, {})->plan.predicted.seconds);
  }
  EXPECT_EQ(leader_.SubmeshCapacity(2)->speed.gemm_flops_per_second, 5e9) << "whichever it will be";
  for (const Leader::Connection worker : {1, 2}) {
    EXPECT_EQ(leader_.PlaceOf(SubmitOnASubmesh()), worker);
    const auto plan = FromRunPlan(PrepareOf(worker, leader_.run_of(newest_))->plan());
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_DOUBLE_EQ(plan->predicted.seconds, seconds[worker - 1]);
  }
}

TEST_F(SubmeshesLeaderTest, AWorkerThatJoinsBringsRoom) {
  const auto plan = PlanForPool(Shape(), EngineOptions(), {.ranks = 1}, 1024, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto join = [&](Leader::Connection worker) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.set_memory_bytes(static_cast<uint64_t>(plan->plan.predicted.run_bytes * 12 / 10));
    return Join(worker, offer);
  };
  ASSERT_EQ(join(1), "");
  const Leader::Ticket first = SubmitOnASubmesh(), second = SubmitOnASubmesh();
  EXPECT_NE(leader_.run_of(first), 0u);
  EXPECT_TRUE(leader_.CrowdedOut(second));
  ASSERT_EQ(join(2), "");
  EXPECT_EQ(leader_.PlaceOf(second), 2u);
}

// The worker that it would have gone on with drains: it is there for the other one alone.
TEST_F(SubmeshesLeaderTest, WhoHasNoWorkersLeftIsRefusedBesideARun) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  const Leader::Ticket first = SubmitOnASubmesh();
  ASSERT_EQ(leader_.PlaceOf(first), 1u);
  Prepare({1});
  const uint64_t run = run_;
  ASSERT_EQ(leader_.PlaceOf(SubmitOnASubmesh()), 2u);
  Prepare({2});
  v1::WorkerMessage leave = OfRun();
  leave.mutable_leave();
  Say(1, leave);
  leader_.OnDisconnected(2, now_);
  run_ = run;
  for (uint64_t second = 1; second <= 11; ++second) {
    EXPECT_TRUE(answers_.empty()) << second;
    SayOperations(1, second);
    Pass(absl::Seconds(1), {1});
  }
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_.back().status())) << answers_.back().status();
  RankDone(1, 0, kVocab);
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(answers_.back().ok()) << answers_.back().status();
}

}  // namespace
}  // namespace meshfill
