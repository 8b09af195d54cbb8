// What a pass of several prompts is predicted to take on a rank, in parts: as Pack has it as a whole.
#include "engine/plan/pass_parts.h"

#include <random>
#include <vector>

#include "engine/plan/pack.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

TEST(PassPartsTest, AreTogetherWhatThePassTakes) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const ModelShape model = {.layers = 3,
                            .hidden = 64,
                            .intermediate = 64,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .vocab = 100,
                            .context_tokens = 65536};
  const PoolSpeed speed = {.slice_seconds = 1e-3, .start_seconds = 1e-4, .lm_head_bytes_per_second = 1e7};
  for (int draw = 0; draw < 20; ++draw) {
    Pack pack({.ranks = 1, .rank_tokens = 1 << 20});
    std::vector<PartSeconds> prompts;
    double attention = 0;
    for (int i = Draw(random, 1, 8); i > 0; --i) {
      const auto choice = MakePlan(model, speed, {.tokens = Draw<int64_t>(random, 1, 500), .ranks = 1});
      ASSERT_TRUE(choice.ok()) << choice.status();
      ASSERT_TRUE(pack.Add(PackShareOf(model, speed, PartFactors(), choice->plan, 0)).has_value());
      prompts.push_back(choice->plan.predicted.parts);
      attention += prompts.back().attention;
    }
    const PartSeconds parts = PassParts(model, speed, prompts);
    EXPECT_NEAR(parts.products + parts.attention + parts.fixed, pack.seconds(), 1e-12);
    EXPECT_DOUBLE_EQ(parts.attention, attention);
    EXPECT_EQ(parts.fixed, prompts.front().fixed) << "threads begin once";
  }
  EXPECT_EQ(PassParts(model, speed, {}), PartSeconds());
}

TEST(PassPartsTest, AddsEveryPart) {
  PartSeconds sum = {.products = 1, .attention = 2, .transfers = 3, .hidden = 4, .weights = 5, .fixed = 6};
  sum += {.products = 10, .attention = 20, .transfers = 30, .hidden = 40, .weights = 50, .fixed = 60};
  EXPECT_EQ(sum, (PartSeconds{
                     .products = 11, .attention = 22, .transfers = 33, .hidden = 44, .weights = 55, .fixed = 66}));
}

TEST(TellsOfSpeedTest, NotWhereSomeHadTheCoresForThemselves) {
  const std::vector<PartSeconds> alike = {{.products = 3, .attention = 1}, {.products = 3, .fixed = 9}};
  const std::vector<PartSeconds> differ = {{.products = 3}, {.products = 4, .attention = 1}, {.products = 4}};
  const std::vector<PartSeconds> idle = {{.products = 3}, {}};
  for (const bool share_cores : {false, true}) {
    EXPECT_TRUE(TellsOfSpeed(alike, share_cores));
    EXPECT_EQ(TellsOfSpeed(differ, share_cores), !share_cores);
    EXPECT_EQ(TellsOfSpeed(idle, share_cores), !share_cores);
  }
}

}  // namespace
}  // namespace meshfill
