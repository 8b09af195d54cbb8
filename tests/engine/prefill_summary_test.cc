#include "engine/prefill_summary.h"

#include <random>

#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

PrefillResult NoRanksTold() {
  const ModelShape model = {.layers = 1,
                            .hidden = 8,
                            .intermediate = 8,
                            .q_heads = 1,
                            .kv_heads = 1,
                            .head_dim = 8,
                            .vocab = 8,
                            .context_tokens = 100};
  return {.plan = MakePlan(model, {}, {.tokens = 100, .ranks = 1})->plan};
}

// The same whatever a rank waits for.
TEST(MeasuredSecondsTest, AreThoseOfTheAverageRank) {
  std::mt19937_64 random(TestSeed());
  const auto seconds = [&] { return std::uniform_real_distribution<double>(0, 10)(random); };
  for (const int ranks : {1, 2, 5}) {
    PrefillResult result = NoRanksTold();
    result.prefill_seconds = seconds();
    double attention = 0, waits = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      RankStats& stats = result.ranks.emplace_back();
      stats.block_seconds = seconds();
      stats.merge_seconds = seconds();
      attention += stats.block_seconds + stats.merge_seconds;
      for (Traffic traffic : kPrefillTraffics) {
        stats.wait_seconds[traffic] = seconds();
        waits += stats.wait_seconds[traffic];
      }
    }
    const MeasuredSeconds measured = MeasuredSecondsOf(result);
    EXPECT_EQ(measured.all, result.prefill_seconds);
    EXPECT_NEAR(measured.attention, attention / ranks, 1e-12);
    EXPECT_NEAR(measured.comm_wait, waits / ranks, 1e-12);
  }
  EXPECT_EQ(MeasuredSecondsOf(NoRanksTold()).comm_wait, 0) << "no rank told anything";
}

}  // namespace
}  // namespace meshfill
