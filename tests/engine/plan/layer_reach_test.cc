#include "engine/plan/layer_reach.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tests/engine/plan/visible_blocks.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

struct Case {
  PlanShape shape;
  int64_t window;

  std::string DebugString() const { return shape.DebugString() + ", window " + std::to_string(window); }
};

// Every layout, with windows that end in any place, few tokens for the ranks, and a cached prefix.
Case DrawCase(std::mt19937_64& random) {
  const int heads = Draw(random, 1, 2);
  const Tile tile = {.a = Draw(random, 1, 5), .b = Draw(random, 1, 8)};
  const int ranks = heads * tile.ranks();
  const auto kind = static_cast<LayoutKind>(Draw(random, 0, 2));
  const auto stripe = Draw<int64_t>(random, 1, 6);
  const int64_t most_tokens = Draw(random, 0, 2) == 0 ? ranks : 300;
  const auto layout = TokenLayout::Make(kind, ranks, Draw<int64_t>(random, 1, most_tokens), stripe);
  PlanShape shape = {.layout = *layout, .heads = heads, .tile = tile};
  if (Draw(random, 0, 3) == 0) {
    shape.cached_tokens =
        Draw(random, 0, 1) ? Draw<int64_t>(random, 1, 60) : layout->stripe() * ranks * Draw(random, 1, 3);
  }
  return {shape, Draw(random, 0, 3) == 0 ? 0 : Draw<int64_t>(random, 1, Draw(random, 0, 1) ? 12 : 200)};
}

// A block is skipped where it has no pair, and there alone; what goes on is what those who come see. Without
// a window all goes round in the paper's order, so that sums keep theirs.
TEST(LayerReach, IsWhatTheQueriesSee) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int parts = 0, skipped = 0;
  for (int draw = 0; draw < 400; ++draw) {
    const Case c = DrawCase(random);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw << ": " << c.DebugString());
    const LayerReach reach(c.shape, c.window);
    const auto visible = VisibleBlocksOf(c.shape, c.window);
    const auto [a, b] = c.shape.tile;
    const int n = a * b;
    if (c.window == 0) {
      ASSERT_TRUE(reach.sees_all());
    }
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) {
        if (reach.sees_all()) {
          ASSERT_TRUE(reach.Sees(i, j));
        } else {
          ASSERT_EQ(reach.Sees(i, j), visible[i][j].pairs > 0) << "Q " << i << ", KV " << j;
        }
      }
    }
    // A Q chunk's hop-th rank is that of its group which has it as Q#hop; its keys are those of its column.
    for (int chunk = 0; chunk < n; ++chunk) {
      for (int hop = 1; hop < a; ++hop) {
        bool needed = false;
        for (int behind = hop; behind < a; ++behind) {
          const int rank = chunk / a * a + (chunk - behind + a) % a;
          ASSERT_EQ(reach.mesh().QChunk(rank, behind), chunk);
          for (int v = 0; v < b; ++v) {
            needed |= visible[chunk][reach.mesh().KvChunk(rank, v)].pairs > 0;
          }
        }
        if (reach.sees_all()) {
          ASSERT_TRUE(reach.QReaches(chunk, hop));
        } else {
          ASSERT_EQ(reach.QReaches(chunk, hop), needed) << "Q " << chunk << " at hop " << hop;
        }
        if (reach.QReaches(chunk, hop)) {
          ASSERT_GE(reach.LargestQ(hop), reach.q_layout().ChunkTokens(chunk));
        }
      }
      for (int hop = 1; hop < b; ++hop) {
        SlotRange needed = {reach.kv_layout().ChunkTokens(chunk), 0};
        for (int behind = hop; behind < b; ++behind) {
          const int rank = (chunk + (reach.sees_all() ? b - behind : behind) * a) % n;
          ASSERT_EQ(reach.mesh().KvChunk(rank, behind), chunk);
          for (int u = 0; u < a; ++u) {
            const VisibleBlock& block = visible[reach.mesh().QChunk(rank, u)][chunk];
            needed.begin = std::min(needed.begin, block.first_key);
            needed.end = std::max(needed.end, block.end_key);
          }
        }
        if (needed.slots() <= 0) needed = {};
        const SlotRange part = reach.KvReach(chunk, hop);
        const SlotRange whole = {0, reach.kv_layout().ChunkTokens(chunk)};
        ASSERT_GE(reach.LargestKv(hop), part.slots());
        if (reach.sees_all()) {
          ASSERT_EQ(part, whole);
        } else if (c.shape.layout.kind() == LayoutKind::kStriped) {
          ASSERT_EQ(part, needed.slots() > 0 ? whole : SlotRange()) << "KV " << chunk << " at hop " << hop;
        } else {
          ASSERT_EQ(part, needed) << "KV " << chunk << " at hop " << hop;
          if (part.slots() > 0 && part != whole) {
            ++parts;
            ASSERT_LE(part.slots(), reach.MostCutKeys());
            if (hop + 1 < b) {
              ASSERT_EQ(reach.KvReach(chunk, hop + 1).slots(), 0) << "only the last rank's is cut";
            }
          }
        }
        skipped += part.slots() == 0 && whole.slots() > 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(parts, 10);
  EXPECT_GT(skipped, 10);
}

// Every message there is, is counted somewhere: none is larger than the largest of its hop, which some rank
// sends where the layout is contiguous.
TEST(LayerReach, NamesTheLargestMessageOfEachHop) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 400; ++draw) {
    Case c = DrawCase(random);
    c.shape.cached_tokens = 0;
    c.shape.layout = *TokenLayout::Make(LayoutKind::kContiguous, c.shape.ranks(), c.shape.layout.tokens(), 1);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw << ": " << c.DebugString());
    const LayerReach reach(c.shape, c.window);
    if (reach.sees_all()) continue;
    const int n = reach.mesh().ranks();
    for (int hop = 1; hop < reach.mesh().tile().a; ++hop) {
      int64_t largest = 0;
      for (int chunk = 0; chunk < n; ++chunk) {
        if (reach.QReaches(chunk, hop)) largest = std::max(largest, reach.q_layout().ChunkTokens(chunk));
      }
      ASSERT_EQ(reach.LargestQ(hop), largest) << "hop " << hop;
    }
    for (int hop = 1; hop < reach.mesh().tile().b; ++hop) {
      int64_t largest = 0;
      for (int chunk = 0; chunk < n; ++chunk) {
        largest = std::max(largest, reach.KvReach(chunk, hop).slots());
      }
      ASSERT_EQ(reach.LargestKv(hop), largest) << "hop " << hop;
    }
  }
}

// The window from which on every chunk of stripes is seen, and the one before it.
TEST(LayerReach, SeesAllFromTheWindowThatReachesTheFarthestStripe) {
  for (const int ranks : {2, 3, 5}) {
    for (const int64_t stripe : {1, 2, 7}) {
      const PlanShape shape = {
          .layout = *TokenLayout::Make(LayoutKind::kStriped, ranks, 3 * ranks * stripe, stripe),
          .tile = {1, ranks}};
      bool saw_all = false;
      for (int64_t window = 1; !saw_all; ++window) {
        const auto visible = VisibleBlocksOf(shape, window);
        saw_all = std::all_of(visible.begin(), visible.end(), [](const auto& row) {
          return std::all_of(row.begin(), row.end(),
                             [](const VisibleBlock& block) { return block.pairs > 0; });
        });
        EXPECT_EQ(LayerReach(shape, window).sees_all(), saw_all)
            << ranks << " ranks, stripes of " << stripe << ", window " << window;
      }
    }
  }
}

TEST(LayerReach, CutsAWindowsKeys) {
  const PlanShape shape = {.layout = *TokenLayout::Make(LayoutKind::kContiguous, 4, 400, 1), .tile = {1, 4}};
  for (const auto& [window, hop] : {std::pair<int64_t, int>{60, 1}, {100, 1}, {200, 2}}) {
    const LayerReach reach(shape, window);
    EXPECT_EQ(reach.MostCutKeys(), std::min<int64_t>(window, 100) - 1);
    EXPECT_EQ(reach.KvReach(0, hop).slots(), reach.MostCutKeys()) << "window " << window;
  }
}

// Visible pairs by block index: the most of any rank, and of all ranks together.
struct Counted {
  std::vector<double> largest;  // [a·b]
  std::vector<double> sum;
  double busiest_rank = 0;
  double total = 0;
};

Counted Count(const Case& c, const Mesh& mesh) {
  const auto visible = VisibleBlocksOf(c.shape, c.window);
  const auto [a, b] = c.shape.tile;
  Counted counted = {.largest = std::vector<double>(a * b), .sum = std::vector<double>(a * b)};
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    double of_rank = 0;
    for (int u = 0; u < a; ++u) {
      for (int v = 0; v < b; ++v) {
        const auto pairs = static_cast<double>(visible[mesh.QChunk(rank, u)][mesh.KvChunk(rank, v)].pairs);
        counted.largest[u * b + v] = std::max(counted.largest[u * b + v], pairs);
        counted.sum[u * b + v] += pairs;
        of_rank += pairs;
      }
    }
    counted.busiest_rank = std::max(counted.busiest_rank, of_rank);
    counted.total += of_rank;
  }
  return counted;
}

TEST(LayerPairs, OfContiguousChunksAreCountedExactly) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int alike = 0;
  for (int draw = 0; draw < 400; ++draw) {
    Case c = DrawCase(random);
    c.shape.cached_tokens = 0;
    c.shape.layout = *TokenLayout::Make(LayoutKind::kContiguous, c.shape.ranks(), c.shape.layout.tokens(), 1);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw << ": " << c.DebugString());
    const LayerReach reach(c.shape, c.window);
    const LayerPairs pairs(reach, 0, c.window);
    const Counted counted = Count(c, reach.mesh());
    const auto [a, b] = c.shape.tile;
    if (pairs.alike()) {  // the largest counts for each block; a rank alone has the diagonal
      ++alike;
      const BlockPairs block = pairs.Of(0, 0);
      const double most = *std::max_element(counted.largest.begin(), counted.largest.end());
      ASSERT_NEAR(block.mean * a * b * a * b, counted.total, 1e-6);
      ASSERT_GE(block.largest, most - 1e-6);
      if (a * b == 1 || reach.q_layout().tokens() >= 2 * reach.q_layout().stripe()) {
        ASSERT_NEAR(block.largest, most, 1e-6);
      }
      continue;
    }
    double waited_for = 0;
    for (int u = 0; u < a; ++u) {
      for (int v = 0; v < b; ++v) {
        const BlockPairs block = pairs.Of(u, v);
        ASSERT_NEAR(block.largest, counted.largest[u * b + v], 1e-6) << u << "," << v;
        ASSERT_NEAR(block.mean * a * b, counted.sum[u * b + v], 1e-6) << u << "," << v;
        ASSERT_EQ(block.largest_rows > 0, block.largest > 0);
        waited_for += block.largest;
      }
    }
    const BlockPairs least = pairs.LeastOfTile();
    EXPECT_NEAR(least.mean * a * b, counted.total, 1e-6);
    EXPECT_LE(least.largest, waited_for + 1e-6);
    EXPECT_LE(least.largest, counted.busiest_rank + 1e-6);
  }
  EXPECT_GT(alike, 0);
}

// Where stripes fill their rounds, also few of them: queries of the first round see no chunk behind theirs
// but those of a prefix.
TEST(LayerPairs, OfWholeRoundsAreCountedExactly) {
  for (const Tile tile : {Tile{1, 4}, Tile{2, 2}, Tile{4, 1}, Tile{2, 3}}) {
    for (const int64_t rounds : {1, 2, 3}) {
      for (const int64_t cached_rounds : {0, 2}) {
        const int64_t stripe = 5, window = 7, round = tile.ranks() * stripe;
        const Case c = {.shape = {.layout = *TokenLayout::Make(LayoutKind::kStriped, tile.ranks(),
                                                               rounds * round, stripe),
                                  .tile = tile,
                                  .cached_tokens = cached_rounds * round},
                        .window = window};
        SCOPED_TRACE(testing::Message() << c.DebugString() << ", " << cached_rounds << " rounds before");
        const LayerReach reach(c.shape, c.window);
        const LayerPairs pairs(reach, c.shape.cached_tokens, c.window);
        ASSERT_FALSE(pairs.alike());
        double mean = 0;
        for (int u = 0; u < tile.a; ++u) {
          for (int v = 0; v < tile.b; ++v) mean += pairs.Of(u, v).mean;
        }
        EXPECT_NEAR(mean * tile.ranks(), Count(c, reach.mesh()).total, 1e-6);
      }
    }
  }
}

// Stripes and zigzag: what all ranks together have is exact or, where blocks differ, within the prompt's last
// stripes; and so is the busiest rank of a prompt of many stripes.
TEST(LayerPairs, OfDealtStripesAreThoseOfTheBusiestRank) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int alike = 0, differ = 0;
  for (int draw = 0; draw < 60; ++draw) {
    Case c = DrawCase(random);
    const bool striped = Draw(random, 0, 3) > 0;
    const int64_t stripe = Draw<int64_t>(random, 1, 4);
    const int64_t rounds = 24;
    c.shape.layout = *TokenLayout::Make(striped ? LayoutKind::kStriped : LayoutKind::kZigzag, c.shape.ranks(),
                                        std::min<int64_t>(1500, rounds * c.shape.ranks() * stripe), stripe);
    if (c.shape.layout.tokens() < rounds * c.shape.ranks() * stripe) continue;
    c.shape.cached_tokens = striped && Draw(random, 0, 1) ? c.shape.ranks() * stripe * Draw(random, 1, 4) : 0;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw << ": " << c.DebugString());
    const LayerReach reach(c.shape, c.window);
    const LayerPairs pairs(reach, c.shape.cached_tokens, c.window);
    const Counted counted = Count(c, reach.mesh());
    const auto [a, b] = c.shape.tile;
    double mean = 0, largest = 0;
    for (int u = 0; u < a; ++u) {
      for (int v = 0; v < b; ++v) {
        mean += pairs.Of(u, v).mean;
        largest += pairs.Of(u, v).largest;
      }
    }
    if (pairs.alike()) {
      ++alike;
      ASSERT_NEAR(mean * a * b, counted.total, 1e-6 * counted.total);
    } else {
      ++differ;
      ASSERT_NEAR(mean * a * b, counted.total, 0.02 * counted.total);
    }
    // Zigzag deals a window unevenly: the first pieces see less of it, and tiles of several rows differ.
    if (!striped && c.window > 0) continue;
    ASSERT_NEAR(largest, counted.busiest_rank, 0.1 * counted.busiest_rank);
  }
  EXPECT_GT(alike, 0);
  EXPECT_GT(differ, 0);
}

// The case that was charged 5.4 times too much: each rank sees its own chunk and the one before.
TEST(LayerPairs, OfAShortWindowAreTwoBlocksOfARing) {
  const int64_t window = 4096, tokens = 131072;
  const auto layout = TokenLayout::Make(LayoutKind::kContiguous, 32, tokens, 64);
  const PlanShape shape = {.layout = *layout, .tile = {.a = 1, .b = 32}};
  const LayerReach reach(shape, window);
  const LayerPairs pairs(reach, 0, window);
  double waited_for = 0;
  for (int v = 0; v < 32; ++v) waited_for += pairs.Of(0, v).largest;
  EXPECT_EQ(pairs.Of(0, 2).largest, 0);
  EXPECT_NEAR(waited_for, 4096.0 * 4096, 1) << "each of a chunk's 4,096 queries sees 4,096 keys";
}

}  // namespace
}  // namespace meshfill
