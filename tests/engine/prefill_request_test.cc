#include "engine/prefill_request.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>

#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

TEST(PlanRequestOfTest, WhatIsOpenIsTheEnginesAndAFixedTileOrStripeIsStriped) {
  const EngineOptions any = {.ranks = 4, .layout = std::nullopt, .stripe = 32};
  EXPECT_EQ(PlanRequestOf(any, {}, 100).layout, std::nullopt);
  EXPECT_EQ(PlanRequestOf(any, {}, 100).stripe, 32);
  EXPECT_EQ(PlanRequestOf(any, {.tile = Tile{2, 2}}, 100).layout, LayoutKind::kStriped);
  EXPECT_EQ(PlanRequestOf(any, {.stripe = 16}, 100).layout, LayoutKind::kStriped);
  EXPECT_EQ(PlanRequestOf(any, {.stripe = 16}, 100).stripe, 16);
  EXPECT_EQ(PlanRequestOf(any, {.tile = Tile{2, 2}, .layout = LayoutKind::kZigzag}, 100).layout,
            LayoutKind::kZigzag);
  const EngineOptions contiguous = {.ranks = 4, .layout = LayoutKind::kContiguous};
  EXPECT_EQ(PlanRequestOf(contiguous, {.tile = Tile{2, 2}}, 100).layout, LayoutKind::kContiguous);
}

// As much as is cached, in whole rounds of stripes and whole blocks, so that a stripe is left to compute.
TEST(UsableCachedTokensTest, IsTheLongestPrefixThatARunCanFollow) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 500; ++draw) {
    const EngineOptions engine = {.stripe = Draw<int64_t>(random, 1, 80)};
    PrefillOptions options;
    if (Draw(random, 0, 1) == 1) options.stripe = Draw<int64_t>(random, 1, 80);
    int block_tokens = 1;
    if (Draw(random, 0, 1) == 1) {
      block_tokens = Draw(random, 1, 64);
      options.block_names = std::make_shared<const KvBlockNames>(KvBlockNames{.block_tokens = block_tokens});
    }
    const int ranks = Draw(random, 1, 6);
    const int64_t tokens = Draw<int64_t>(random, 1, 20'000);
    const int64_t cached = Draw(random, 0, 2) == 0 ? tokens : Draw<int64_t>(random, 0, tokens);
    const int64_t stripe = options.stripe.value_or(engine.stripe);
    int64_t longest = 0;
    for (int64_t prefix = ranks * stripe; prefix <= cached && prefix + stripe <= tokens;
         prefix += ranks * stripe) {
      if (prefix % block_tokens == 0) longest = prefix;
    }
    EXPECT_EQ(UsableCachedTokens(engine, options, ranks, cached, tokens), longest)
        << cached << " of " << tokens << " tokens, " << ranks << " ranks, stripes of " << stripe
        << ", blocks of " << block_tokens;
  }
}

TEST(UsableCachedTokensTest, OnlyStripesFollowAPrefix) {
  const EngineOptions any = {.layout = std::nullopt}, zigzag = {.layout = LayoutKind::kZigzag};
  EXPECT_EQ(UsableCachedTokens(any, {}, 2, 256, 1000), 256);
  EXPECT_EQ(UsableCachedTokens(zigzag, {}, 2, 256, 1000), 0);
  EXPECT_EQ(UsableCachedTokens(zigzag, {.layout = LayoutKind::kStriped}, 2, 256, 1000), 256);
  EXPECT_EQ(UsableCachedTokens(any, {.layout = LayoutKind::kContiguous}, 2, 256, 1000), 0);
}

}  // namespace
}  // namespace meshfill
