#include "engine/mesh/placement.h"

#include <algorithm>
#include <set>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

TEST(Placement, UsesEveryGpuOnceAndKeepsABoxInANode) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 200; ++draw) {
    const Grid box{.planes = Draw(random, 1, 3), .rows = Draw(random, 1, 3), .columns = Draw(random, 1, 3)};
    const Grid grid{.planes = box.planes * Draw(random, 1, 3),
                    .rows = box.rows * Draw(random, 1, 3),
                    .columns = box.columns * Draw(random, 1, 3)};
    const Placement placement = Boxed(grid, box);
    const std::set<int> gpus(placement.seat_of_rank.begin(), placement.seat_of_rank.end());
    EXPECT_EQ(static_cast<int>(gpus.size()), grid.ranks());
    EXPECT_EQ(*gpus.rbegin(), grid.ranks() - 1);
    const auto node_of = [&](int i, int y, int x) {
      return placement.seat_of_rank[grid.Rank(i, y, x)] / box.ranks();
    };
    for (int i = 0; i < grid.planes; ++i) {
      for (int y = 0; y < grid.rows; ++y) {
        for (int x = 0; x < grid.columns; ++x) {
          EXPECT_EQ(node_of(i, y, x), node_of(i / box.planes * box.planes, y / box.rows * box.rows,
                                              x / box.columns * box.columns));
        }
      }
    }
  }
}

TEST(Placement, EveryBoxThatFillsANodeIsThereOnce) {
  // 8 = 2·2·2 = 4·2·1 = … of a grid that all of them divide: row-first is the box 8x1x1.
  const auto placements = PlacementsOf({.planes = 8, .rows = 8, .columns = 8}, 8);
  EXPECT_EQ(placements.size(), 10u);
  EXPECT_EQ(placements.front().name, "row-first");
  EXPECT_EQ(placements[1].name, "box 1x1x8");
  std::set<std::vector<int>> distinct;
  for (const Placement& placement : placements) distinct.insert(placement.seat_of_rank);
  EXPECT_EQ(distinct.size(), placements.size());
  // No box of 8 divides these ranks: row-first alone.
  EXPECT_EQ(PlacementsOf({.planes = 1, .rows = 3, .columns = 5}, 8).size(), 1u);
  // Fewer ranks than a node has GPUs: all are in one node wherever they stand.
  EXPECT_EQ(PlacementsOf({.planes = 1, .rows = 2, .columns = 2}, 8).size(), 1u);
}

}  // namespace
}  // namespace meshfill
