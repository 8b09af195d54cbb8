#include "engine/schedule/optimal_schedule.h"

#include "engine/schedule/schedule_cost.h"
#include "engine/schedule/schedule_search.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/lockstep_mesh.h"

namespace meshfill {
namespace {

OverlapCosts DrawCosts(std::mt19937_64& random, int limit, int least = 1) {
  limit = Draw(random, 1, limit);
  return {.c_q = Draw(random, least, limit),
          .c_kv = Draw(random, least, limit),
          .c_o = Draw(random, least, limit)};
}

std::string Named(uint64_t seed, Tile tile, OverlapCosts costs) {
  return "seed " + std::to_string(seed) + ", tile " + tile.DebugString() + ", costs " +
         std::to_string(costs.c_q) + " " + std::to_string(costs.c_kv) + " " + std::to_string(costs.c_o);
}

TEST(OptimalSchedule, TakesAsLongAsTheSearchs) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    const Tile tile = {.a = Draw(random, 1, 8), .b = Draw(random, 1, 8)};
    const OverlapCosts costs = DrawCosts(random, 16, /*least=*/0);
    ASSERT_EQ(TimeInBlocks(OptimalSchedule(tile, costs), costs),
              TimeInBlocks(SearchSchedule(tile, costs), costs))
        << Named(seed, tile, costs);
  }
}

TEST(OptimalSchedule, TakesNoLongerThanGreedyAndNoMoreMemoryWhereAsLong) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const Tile tile = {.a = Draw(random, 1, 64), .b = Draw(random, 1, 64)};
    const OverlapCosts costs = DrawCosts(random, Draw(random, 0, 1) ? 8 : tile.ranks());
    const Schedule schedule = OptimalSchedule(tile, costs);
    const Schedule greedy = GreedySchedule(tile, costs);
    ASSERT_TRUE(CheckSchedule(schedule).ok()) << Named(seed, tile, costs) << ": " << CheckSchedule(schedule);
    ASSERT_GE(TimeInBlocks(schedule, costs), LeastTimeBound(tile, costs)) << Named(seed, tile, costs);
    ASSERT_LE(TimeInBlocks(schedule, costs), TimeInBlocks(greedy, costs)) << Named(seed, tile, costs);
    if (TimeInBlocks(schedule, costs) < TimeInBlocks(greedy, costs)) continue;
    ASSERT_LE(PeakChunkCost(schedule, costs), PeakChunkCost(greedy, costs)) << Named(seed, tile, costs);
  }
}

TEST(OptimalSchedule, RunsOnEveryMesh) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      const OverlapCosts costs = DrawCosts(random, 12, /*least=*/0);
      const Schedule schedule = OptimalSchedule(tile, costs);
      ASSERT_TRUE(CheckSchedule(schedule).ok())
          << Named(seed, tile, costs) << ": " << CheckSchedule(schedule);
      ASSERT_EQ(LockstepMesh(tile).Run(schedule), "") << Named(seed, tile, costs) << schedule.DebugString();
    }
  }
}

TEST(OptimalSchedule, OfOneRankIsOneBlock) {
  EXPECT_EQ(OptimalSchedule({.a = 1, .b = 1}, {}).DebugString(), "1x1 | none: (0,0)");
}

// Short messages first, with nothing beside them, leave a whole row to the long one.
TEST(OptimalSchedule, ComputesNothingBesideMessagesThatCostNothing) {
  EXPECT_EQ(OptimalSchedule({.a = 3, .b = 2}, {.c_q = 0, .c_kv = 9, .c_o = 0}).DebugString(),
            "3x2 | q: | q: | kv: (1,0) (2,0) (0,0) | none: (1,1) | o: | none: (2,1) | o: | none: (0,1)");
}

TEST(OptimalSchedule, OfARingReceivesWhileItComputes) {
  EXPECT_EQ(OptimalSchedule({.a = 1, .b = 4}, {}).DebugString(),
            "1x4 | kv: (0,0) | kv: (0,1) | kv: (0,2) | none: (0,3)");
}

// KV first, as the search takes it, is as fast, and still has the first KV when the third arrives.
TEST(OptimalSchedule, OfEquallyFastOrdersTheOneThatHoldsLeastIsTaken) {
  const Tile tile = {.a = 2, .b = 3};
  const Schedule schedule = OptimalSchedule(tile, {});
  const Schedule search = SearchSchedule(tile, {});
  EXPECT_EQ(schedule.DebugString(),
            "2x3 | q: (0,0) | kv: (1,0) | kv: (1,1) | none: (1,2) | o: (0,1) | none: (0,2)");
  EXPECT_EQ(TimeInBlocks(schedule, {}), TimeInBlocks(search, {}));
  EXPECT_EQ(PeakChunkCost(schedule, {}), 6);
  EXPECT_EQ(PeakChunkCost(search, {}), 7) << search.DebugString();
}

// Pass-Q sends each O right after its row, so that few live at once, where Algorithm 2 keeps them all.
TEST(OptimalSchedule, OfPassQSendsEachOutputAsSoonAsItIsWhole) {
  EXPECT_EQ(OptimalSchedule({.a = 4, .b = 1}, {}).DebugString(),
            "4x1 | q: (0,0) | q: (1,0) | o: (2,0) | q: | o: (3,0) | o:");
  EXPECT_LT(PeakChunkCost(OptimalSchedule({.a = 32, .b = 1}, {}), {}), 10);
  EXPECT_GT(PeakChunkCost(GreedySchedule({.a = 32, .b = 1}, {}), {}), 30);
}

}  // namespace
}  // namespace meshfill
