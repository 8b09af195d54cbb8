#include "engine/plan/pack.h"

#include <algorithm>
#include <random>
#include <vector>

#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

PackShare DrawShare(std::mt19937_64& random, int64_t most_tokens) {
  std::uniform_real_distribution<double> seconds(0, 1);
  return {.tokens = Draw<int64_t>(random, 1, most_tokens),
          .bytes = Draw<int64_t>(random, 0, 300),
          .least_seconds = Draw(random, 0, 1) * seconds(random),
          .pass_seconds = seconds(random),
          .added_seconds = seconds(random)};
}

// What a prompt adds, and what a pass takes once, are together what its plan predicts.
TEST(Pack, KnowsWhatAPromptAddsToAPass) {
  const ModelShape model = {.layers = 3,
                            .hidden = 64,
                            .intermediate = 64,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .vocab = 100,
                            .context_tokens = 65536};
  const PoolSpeed speed = {.slice_seconds = 1e-3, .start_seconds = 1e-4};
  const PlanRequest request = {.tokens = 50, .ranks = 1};
  const auto resident = MakePlan(model, speed, request);
  ASSERT_TRUE(resident.ok()) << resident.status();
  const Prediction& predicted = resident->plan.predicted;
  const PackShare share = PackShareOf(model, speed, PartFactors(), resident->plan, /*pass_bytes=*/100);
  EXPECT_EQ(share.tokens, 50);
  EXPECT_EQ(share.bytes, predicted.run_bytes - 100);
  EXPECT_EQ(share.least_seconds, 0);
  EXPECT_GT(share.pass_seconds, 3e-3) << "a slice in each layer";
  EXPECT_GT(share.added_seconds, 0);
  EXPECT_DOUBLE_EQ(share.pass_seconds + share.added_seconds, predicted.seconds);
  EXPECT_EQ(PackShareOf(model, speed, PartFactors(), resident->plan, /*pass_bytes=*/1 << 30).bytes, 0);

  PartFactors slow;
  slow.products = 2;
  slow.fixed_seconds = 1;
  const double corrected = PackShareOf(model, speed, slow, resident->plan, 0).pass_seconds;
  EXPECT_GT(corrected, 1 + 1.5 * (share.pass_seconds - predicted.parts.fixed));

  PlanRequest streams = request;
  streams.weights = {.mode = WeightMode::kStreamed, .run_bytes = 400, .layer_seconds = 1};
  const auto streamed = MakePlan(model, speed, streams);
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  const PackShare past = PackShareOf(model, speed, PartFactors(), streamed->plan, 400);
  EXPECT_EQ(past.least_seconds, streamed->plan.predicted.seconds) << "the weights take so long to come";
  EXPECT_LT(past.added_seconds, 1);
}

TEST(Pack, HoldsAsManyTokensAsFit) {
  for (const int64_t fits : {1000, 500, 499, 100, 3}) {
    const auto fit = [fits](int64_t tokens) { return tokens <= fits; };
    const int64_t tokens = LargestPackTokens(1000, fit);
    EXPECT_LE(tokens, fits);
    EXPECT_GT(2 * (tokens + 1), std::min<int64_t>(fits, 1000)) << tokens;
  }
  EXPECT_EQ(LargestPackTokens(1000, [](int64_t) { return true; }), 1000);
  EXPECT_EQ(LargestPackTokens(1000, [](int64_t) { return false; }), 0);
  EXPECT_EQ(LargestPackTokens(1000, [](int64_t tokens) { return tokens <= 1; }), 0);
  EXPECT_EQ(LargestPackTokens(1, [](int64_t) { return true; }), 0) << "one prompt is no pack";
}

// Each goes to a rank that has fewest tokens and room for it; who has none is left out, and changes nothing.
TEST(Pack, DealsToTheRankThatHasLeast) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  int refused = 0;
  for (int draw = 0; draw < 200; ++draw) {
    const PackRoom room = {.ranks = Draw(random, 1, 5),
                           .rank_tokens = Draw<int64_t>(random, 1, 300),
                           .rank_bytes = Draw<int64_t>(random, 1, 1000)};
    Pack pack(room);
    std::vector<int64_t> tokens(static_cast<size_t>(room.ranks)), bytes(tokens);
    std::vector<double> added(static_cast<size_t>(room.ranks));
    double least = 0, once = 0;
    for (int i = 0; i < 30; ++i) {
      const PackShare share = DrawShare(random, 200);
      const double before = pack.seconds();
      const std::optional<int> rank = pack.Add(share);
      constexpr int64_t kNone = 1 << 30;
      int64_t fewest = kNone;
      for (size_t of = 0; of < tokens.size(); ++of) {
        const bool has_room =
            tokens[of] + share.tokens <= room.rank_tokens && bytes[of] + share.bytes <= room.rank_bytes;
        if (has_room) fewest = std::min(fewest, tokens[of]);
      }
      ASSERT_EQ(rank.has_value(), fewest != kNone);
      if (!rank.has_value()) {
        ++refused;
        EXPECT_EQ(pack.seconds(), before);
        continue;
      }
      EXPECT_EQ(tokens[*rank], fewest);
      tokens[*rank] += share.tokens;
      bytes[*rank] += share.bytes;
      ASSERT_LE(bytes[*rank], room.rank_bytes);
      added[*rank] += share.added_seconds;
      least = std::max(least, share.least_seconds);
      once = std::max(once, share.pass_seconds);
      EXPECT_DOUBLE_EQ(pack.seconds(), std::max(least, once + *std::max_element(added.begin(), added.end())));
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(Pack, HasNoRoomWhereNoneIsGiven) {
  Pack none(PackRoom{});
  EXPECT_EQ(none.Add({.tokens = 1}), std::nullopt);
  EXPECT_EQ(none.seconds(), 0);
  Pack pack({.ranks = 2, .rank_tokens = 10});
  EXPECT_EQ(pack.Add({.tokens = 0, .pass_seconds = 5}), std::nullopt) << "it runs in a pass of its own";
  EXPECT_EQ(pack.seconds(), 0);
  EXPECT_EQ(pack.Add({.tokens = 10}), 0);
  EXPECT_EQ(pack.Add({.tokens = 10}), 1);
  EXPECT_EQ(pack.Add({.tokens = 1}), std::nullopt);
}

}  // namespace
}  // namespace meshfill
