#include "engine/plan/pieces.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

ModelShape Small() {
  return {.layers = 4,
          .hidden = 256,
          .intermediate = 512,
          .q_heads = 8,
          .kv_heads = 2,
          .head_dim = 32,
          .vocab = 1000,
          .context_tokens = 1 << 20,
          .dtype = DType::kBf16};
}

TEST(MakePlanInPieces, APromptThatFitsIsWhole) {
  const PlanRequest request = {.tokens = 5000, .ranks = 4};
  const auto whole = MakePlan(Small(), {}, request);
  const auto planned = MakePlanInPieces(Small(), {}, request, 256);
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->plan, whole->plan);
  EXPECT_TRUE(planned->pieces.empty());
}

// The pieces are the prompt's tokens in order, each fits, each follows those before it, and a granule more in
// each would not fit.
TEST(MakePlanInPieces, TakesTheLongestPiecesThatFit) {
  std::mt19937_64 random(TestSeed());
  const PoolSpeed speed = {.slice_tokens = 64};
  int cut = 0;
  for (int draw = 0; draw < 60; ++draw) {
    PlanRequest request = {.tokens = Draw<int64_t>(random, 3000, 20'000),
                           .ranks = Draw<int>(random, 1, 6),
                           .stripe = Draw<int64_t>(random, 1, 80)};
    const int64_t granule = std::lcm<int64_t>(request.ranks * request.stripe, 16);
    request.cached_tokens = Draw<int64_t>(random, 0, 1) * Draw<int64_t>(random, 0, 20) * granule;
    if (Draw<int>(random, 0, 2) == 0) request.tile = Tile{1, request.ranks};
    request.weights = {.mode = WeightMode::kStreamed, .layer_seconds = 0.1, .head_seconds = 0.01};
    const int64_t needed = MakePlan(Small(), speed, request)->plan.predicted.peak_bytes;
    request.memory_budget_bytes =
        static_cast<int64_t>(static_cast<double>(needed) * Draw<int>(random, 40, 95) / 100);
    const auto planned = MakePlanInPieces(Small(), speed, request, granule);
    if (!planned.ok()) {
      EXPECT_TRUE(absl::IsFailedPrecondition(planned.status())) << planned.status();
      continue;
    }
    if (planned->pieces.empty()) {  // another shape needs less
      EXPECT_TRUE(MakePlan(Small(), speed, request).ok());
      continue;
    }
    ++cut;
    ASSERT_GT(planned->pieces.size(), 1u);
    int64_t first = request.cached_tokens, longest = 0;
    Prediction sum;
    CommBytes sent;
    for (const Plan& piece : planned->pieces) {
      EXPECT_EQ(piece.cached_tokens, first);
      EXPECT_TRUE(CanFollow(piece.layout, first)) << piece.DebugString() << " after " << first;
      EXPECT_EQ(first % 16, request.cached_tokens % 16);
      EXPECT_EQ(piece.layout.stripe(), request.stripe);
      EXPECT_LE(piece.predicted.peak_bytes, request.memory_budget_bytes);
      EXPECT_LE(piece.predicted.peak_bytes, planned->plan.predicted.peak_bytes);
      first += piece.layout.tokens();
      sum.seconds += piece.predicted.seconds;
      sum.compute_seconds += piece.predicted.compute_seconds;
      sum.comm_wait_seconds += piece.predicted.comm_wait_seconds;
      sum.weight_seconds += piece.predicted.weight_seconds;
      sum.parts += piece.predicted.parts;
      sum.run_bytes = std::max(sum.run_bytes, piece.predicted.run_bytes);
      EXPECT_EQ(planned->plan.predicted.weight_bytes, piece.predicted.weight_bytes);
      sent += piece.predicted.comm_bytes;
      longest = std::max(longest, piece.layout.tokens());
    }
    EXPECT_EQ(first, request.cached_tokens + request.tokens);
    EXPECT_DOUBLE_EQ(planned->plan.predicted.seconds, sum.seconds);
    EXPECT_DOUBLE_EQ(planned->plan.predicted.compute_seconds, sum.compute_seconds);
    EXPECT_DOUBLE_EQ(planned->plan.predicted.comm_wait_seconds, sum.comm_wait_seconds);
    EXPECT_DOUBLE_EQ(planned->plan.predicted.weight_seconds, sum.weight_seconds);
    EXPECT_EQ(planned->plan.predicted.parts, sum.parts);
    EXPECT_EQ(planned->plan.predicted.run_bytes, sum.run_bytes);
    EXPECT_EQ(planned->plan.predicted.comm_bytes, sent);
    EXPECT_EQ(planned->plan.cached_tokens, planned->pieces.back().cached_tokens);

    PlanRequest longer = request;  // as the one that sees most keys
    // Of two pieces, the first may have given the second a granule.
    longer.tokens = longest + (planned->pieces.size() == 2 ? 2 : 1) * granule;
    longer.cached_tokens += request.tokens - longer.tokens;
    EXPECT_TRUE(longer.cached_tokens <= 0 || !MakePlan(Small(), speed, longer).ok());
  }
  EXPECT_GT(cut, 20);
}

TEST(RoundTokens, AreAStripeForEachRank) {
  EXPECT_EQ(RoundTokens(4, 64), 256);
  EXPECT_EQ(RoundTokens(4, 0), 4);
  EXPECT_EQ(RoundTokens(4, std::numeric_limits<int64_t>::max()), int64_t{4} << 31);
}

// A shorter stripe would deal the piece's keys otherwise than those before them.
TEST(MakePlanInPieces, TheLastPieceHasAWholeStripe) {
  const int64_t stripe = 64, granule = 2 * stripe;
  const struct {
    int64_t fits;  // tokens of a piece
    std::vector<int64_t> pieces;
  } cases[] = {{4 * granule, {512, 512, 384, 138}},
               {granule + 10, {128, 128, 138}},
               {granule + 10, {128, 128, 128, 138}}};  // two granules: 256, 128 and 138
  for (const auto& [fits, pieces] : cases) {
    PlanRequest request = {.tokens = std::reduce(pieces.begin(), pieces.end()), .ranks = 2, .stripe = stripe};
    PlanRequest last = request;
    last.tokens = fits;
    last.cached_tokens = request.tokens - fits;
    request.memory_budget_bytes = MakePlan(Small(), {}, last)->plan.predicted.run_bytes;
    const auto planned = MakePlanInPieces(Small(), {}, request, granule);
    ASSERT_TRUE(planned.ok()) << planned.status();
    std::vector<int64_t> tokens;
    for (const Plan& piece : planned->pieces) tokens.push_back(piece.layout.tokens());
    EXPECT_EQ(tokens, pieces);
  }
}

TEST(MakePlanInPieces, OnlyTheLastPieceTakesTheHead) {
  PlanRequest request = {.tokens = 20'000, .ranks = 2};
  request.memory_budget_bytes = MakePlan(Small(), {}, request)->plan.predicted.run_bytes / 2;
  request.weights = {.mode = WeightMode::kSharded,
                     .head_seconds = 1e6,  // beside which a piece takes no time
                     .sent_bytes = 1000,
                     .sent_head_bytes = 100};
  const auto planned = MakePlanInPieces(Small(), {}, request, 128);
  ASSERT_TRUE(planned.ok()) << planned.status();
  ASSERT_GT(planned->pieces.size(), 1u);
  for (const Plan& piece : planned->pieces) {
    const bool is_last = &piece == &planned->pieces.back();
    EXPECT_EQ(piece.predicted.comm_bytes[Traffic::kGather], is_last ? 1000 : 900);
    EXPECT_EQ(piece.predicted.seconds > 1e6, is_last);
  }
}

// Each rank's keys of the prompt lie behind its own of the prefix, as they are dealt.
TEST(CanFollow, LeavesThePrefixWhereItIs) {
  std::mt19937_64 random(TestSeed());
  int follow = 0;
  for (int draw = 0; draw < 200; ++draw) {
    const TokenLayout layout =
        TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), Draw(random, 1, 6),
                          Draw<int64_t>(random, 1, 500), Draw<int64_t>(random, 1, 40))
            .value();
    const int64_t stripes = Draw(random, 0, 20), cached = stripes * layout.stripe();
    const bool whole_rounds = layout.kind() == LayoutKind::kStriped && stripes % layout.ranks() == 0;
    EXPECT_EQ(CanFollow(layout, cached), cached == 0 || whole_rounds) << layout.DebugString();
    if (!CanFollow(layout, cached)) continue;
    ++follow;
    const TokenLayout keys = KvLayout(layout, cached);
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const int64_t before = keys.ChunkTokens(rank) - layout.ChunkTokens(rank);
      for (int64_t slot = 0; slot < layout.ChunkTokens(rank); ++slot) {
        ASSERT_EQ(keys.TokenAt(rank, before + slot), cached + layout.TokenAt(rank, slot));
      }
    }
  }
  EXPECT_GT(follow, 20);
}

TEST(MakePlanInPieces, SaysWhatDoesNotFitEvenSo) {
  PlanRequest request = {.tokens = 100'000, .memory_budget_bytes = 1000};
  const auto refused = MakePlanInPieces(Small(), {}, request, 64);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("pieces of 448 tokens"), std::string::npos) << refused.status();
  // Nothing can follow keys that are dealt in one stripe a rank.
  request.memory_budget_bytes = MakePlan(Small(), {}, {.tokens = 100'000})->plan.predicted.peak_bytes / 2;
  EXPECT_TRUE(MakePlanInPieces(Small(), {}, request, 64).ok());
  request.layout = LayoutKind::kContiguous;
  EXPECT_TRUE(absl::IsFailedPrecondition(MakePlanInPieces(Small(), {}, request, 64).status()));
  request.tokens = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(MakePlanInPieces(Small(), {}, request, 64).status()));
}

TEST(CheckKvOfPieces, KAndVOfAllPiecesMustHaveRoomAtSomeTime) {
  PlanRequest request = {.tokens = 20'000, .cached_tokens = 128, .ranks = 2};
  const auto whole = MakePlanInPieces(Small(), {}, request, 128);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_TRUE(CheckKvOfPieces(Small(), request, *whole, 0).ok()) << "a whole prompt need not keep any";
  request.memory_budget_bytes = whole->plan.predicted.peak_bytes * 7 / 10;
  const auto pieces = MakePlanInPieces(Small(), {}, request, 128);
  ASSERT_TRUE(pieces.ok()) << pieces.status();
  ASSERT_GT(pieces->pieces.size(), 1u);
  const int64_t bytes = int64_t{4} * 2 * 2 * 32 * 2 * (128 + 20'000);  // layers, K and V, heads, of bf16
  EXPECT_TRUE(CheckKvOfPieces(Small(), request, *pieces, bytes).ok());
  const absl::Status refused = CheckKvOfPieces(Small(), request, *pieces, bytes - 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
}

}  // namespace
}  // namespace meshfill
