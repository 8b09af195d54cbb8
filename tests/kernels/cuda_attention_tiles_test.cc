#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_params.h"
#include "kernels/cuda/attention_sm80.cuh"
#include "kernels/cuda/attention_sm90.cuh"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/fragments.h"
#include "kernels/stream.h"
#include "tests/kernels/random_band.h"

namespace meshfill {
namespace {

class CudaAttentionTilesTest : public testing::Test {
 protected:
  BlockShape RandomShape() {
    const int64_t q_tokens = Draw(random_, 1, 300), k_tokens = Draw(random_, 0, 300);
    const int kv_heads = Pick(random_, {1, 2, 3, 8}), group = Pick(random_, {1, 2, 4, 16});
    band_ = RandomBand(random_, q_tokens, k_tokens);
    return MakeAttentionParams({.q_tokens = q_tokens,
                                .k_tokens = k_tokens,
                                .q_heads = kv_heads * group,
                                .kv_heads = kv_heads,
                                .head_dim = 64,
                                .band = band_},
                               Draw(random_, 1, 1'000'000))
        .shape;
  }

  const uint32_t seed_ = TestSeed();
  std::mt19937 random_{seed_};
  Band band_;
};

TEST_F(CudaAttentionTilesTest, VisibleKeysAreTheBands) {
  for (int draw = 0; draw < 200; ++draw) {
    const BlockShape shape = RandomShape();
    SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_, ", draw ", draw, ": ", DebugString(band_)));
    for (uint32_t q = 0; q < shape.q_tokens; ++q) {
      const KeySlots visible = shape.VisibleKeys(q);
      for (uint32_t k = 0; k < shape.k_tokens; ++k) {
        ASSERT_EQ(visible.Contains(k), band_.Visible(q, k)) << "query " << q << ", key " << k;
      }
      ASSERT_FALSE(visible.Contains(shape.k_tokens));  // what pads a ragged tile is hidden
    }
  }
}

// Positions up to 2^31 − 1, strides and widths beyond it.
TEST_F(CudaAttentionTilesTest, TheLargestPositionsDoNotOverflow) {
  constexpr int64_t kEnd = int64_t{1} << 31;
  for (const SlotPositions& slots : {SlotPositions{.base = kEnd - 100},
                                     SlotPositions{.base = (kEnd - 64 * 100) / 64, .stride = 7, .width = 64},
                                     SlotPositions{.base = 0, .stride = 1, .width = kEnd},
                                     SlotPositions{.base = 1, .stride = kEnd, .width = kEnd / 2},
                                     SlotPositions{.base = 0, .stride = kEnd - 1, .width = 1}}) {
    const DeviceSlots device = DeviceSlots::From(slots);
    for (uint32_t slot = 0; slot < 100 && slots.At(slot) < kEnd; ++slot) {
      const auto position = static_cast<uint32_t>(slots.At(slot));
      ASSERT_EQ(device.At(slot), position);
      ASSERT_EQ(device.Before(position, 100), slot);
      ASSERT_EQ(device.Before(position + 1, 100), slot + 1);
    }
  }
}

TEST_F(CudaAttentionTilesTest, KeyTilesHoldWhatTheQueriesSee) {
  constexpr uint32_t kRows = 32, kKeys = 16;
  for (int draw = 0; draw < 300; ++draw) {
    const BlockShape shape = RandomShape();
    SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_, ", draw ", draw, ": ", DebugString(band_)));
    for (uint32_t begin = 0; begin < shape.q_tokens; begin += kRows) {
      const KeyTiles<kRows, kKeys> keys(shape, {.head = 0, .begin = begin});
      const uint32_t end = std::min(begin + kRows, shape.q_tokens);
      uint32_t first_whole = UINT32_MAX;
      for (uint32_t tile = 0; tile * kKeys < shape.k_tokens + kKeys; ++tile) {
        int visible = 0;
        for (uint32_t q = begin; q < end; ++q) {
          for (uint32_t k = tile * kKeys; k < std::min((tile + 1) * kKeys, shape.k_tokens); ++k) {
            visible += band_.Visible(q, k);
          }
        }
        const bool loaded = tile >= keys.begin && tile < keys.end;
        ASSERT_TRUE(loaded || visible == 0) << "tile " << tile << " is visible";
        if (loaded) {
          ASSERT_EQ(keys.Whole(tile), visible == static_cast<int>((end - begin) * kKeys)) << tile;
          if (keys.Whole(tile)) first_whole = std::min(first_whole, tile);
        }
      }
      if (first_whole != UINT32_MAX) ASSERT_EQ(keys.FirstWhole(), first_whole);
      ASSERT_TRUE(keys.Empty() || (shape.VisibleKeys(begin).begin < (keys.begin + 1) * kKeys &&
                                   shape.VisibleKeys(end - 1).end > (keys.end - 1) * kKeys))
          << "a tile beyond the range is loaded";
    }
  }
}

// Every tile of every head once.
TEST_F(CudaAttentionTilesTest, PersistentCtasShareTheTiles) {
  constexpr uint32_t kRows = 64;
  for (int draw = 0; draw < 200; ++draw) {
    const BlockShape shape = RandomShape();
    const auto ctas = static_cast<uint32_t>(Draw(random_, 1, 140));
    SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_, ", draw ", draw, ", ctas ", ctas));
    const QueryTiles<kRows> tiles(shape);
    std::set<uint32_t> indices;
    std::set<std::pair<uint32_t, uint32_t>> seen;
    for (uint32_t cta = 0; cta < ctas; ++cta) {
      for (uint32_t round = 0; round * ctas < tiles.count(); ++round) {
        const uint32_t index = TileOfRound(round, cta, ctas);
        if (index >= tiles.count()) continue;
        indices.insert(index);
        const QueryTile tile = tiles.At(index);
        ASSERT_LT(tile.head, shape.q_heads);
        ASSERT_LT(tile.begin, shape.q_tokens);
        ASSERT_TRUE(seen.emplace(tile.head, tile.begin).second);
      }
    }
    ASSERT_EQ(seen.size(), tiles.count());
    ASSERT_EQ(indices.size(), tiles.count());
    for (uint32_t index = 1; index < tiles.count(); ++index) {
      const QueryTile before = tiles.At(index - 1), tile = tiles.At(index);
      const uint32_t step = before.begin > tile.begin ? before.begin - tile.begin : tile.begin - before.begin;
      ASSERT_LE(step, kRows) << "neighbours differ in work";
    }
    ASSERT_EQ(tiles.At(tiles.count() - 1).begin, 0u) << "the last tile is none of the shortest";
    ASSERT_EQ(shape.group.Remainder(shape.section_heads), 0u);
  }
}

// The key tiles of a causal block over 132 CTAs: the busiest has little more than the mean.
TEST_F(CudaAttentionTilesTest, CausalWorkIsBalanced) {
  constexpr uint32_t kRows = 128, kKeys = 128, kCtas = 132;
  for (const int64_t tokens : {16384, 32768, 131072}) {
    const BlockShape shape =
        MakeAttentionParams(
            {.q_tokens = tokens, .k_tokens = tokens, .q_heads = 32, .kv_heads = 8, .head_dim = 128}, 50 << 20)
            .shape;
    const QueryTiles<kRows> tiles(shape);
    uint64_t total = 0, busiest = 0;
    for (uint32_t cta = 0; cta < kCtas; ++cta) {
      uint64_t work = 0;
      for (uint32_t round = 0; round * kCtas < tiles.count(); ++round) {
        const uint32_t index = TileOfRound(round, cta, kCtas);
        if (index >= tiles.count()) continue;
        const KeyTiles<kRows, kKeys> keys(shape, tiles.At(index));
        work += keys.end - keys.begin;
      }
      total += work;
      busiest = std::max(busiest, work);
    }
    EXPECT_LE(static_cast<double>(busiest) * kCtas / static_cast<double>(total), 1.02) << tokens << " tokens";
  }
}

// Each element of a swizzled tile has a place of its own, and eight rows of a chunk lie in eight different
// banks.
TEST_F(CudaAttentionTilesTest, SwizzledTilesArePermutations) {
  for (const uint32_t rows : {64u, 80u, 128u, 192u}) {
    for (const uint32_t columns : {64u, 96u, 128u, 256u}) {
      std::set<uint32_t> offsets;
      for (uint32_t row = 0; row < rows; ++row) {
        for (uint32_t chunk = 0; chunk < columns / 8; ++chunk) {
          const uint32_t offset = ChunkOffset(rows, row, chunk);
          ASSERT_LE(offset + 16, TileBytes(rows, columns));
          ASSERT_TRUE(offsets.insert(offset).second);
          if (row % 8 != 0) continue;
          std::set<uint32_t> banks;
          for (uint32_t next = 0; next < 8; ++next)
            banks.insert(ChunkOffset(rows, row + next, chunk) / 16 % 8);
          ASSERT_EQ(banks.size(), 8u);
        }
      }
    }
  }
}

TEST_F(CudaAttentionTilesTest, DescriptorsHoldTheirFields) {
  constexpr uint64_t kDescriptor = WgmmaDescriptor(0x2c400, 16384, 64);
  static_assert((kDescriptor & 0x3fff) == 0x2c400 >> 4);
  static_assert((kDescriptor >> 16 & 0x3fff) == 16384 >> 4);
  static_assert((kDescriptor >> 32 & 0x3fff) == 1024 >> 4);
  static_assert(kDescriptor >> 62 == 1);
  static_assert((kDescriptor >> 46 & 0xffff) == 0);  // base offset and what is reserved
  constexpr uint64_t kNarrow = WgmmaDescriptor(0x2c400, 7168, 32);
  static_assert((kNarrow >> 32 & 0x3fff) == 512 >> 4);
  static_assert(kNarrow >> 62 == 2);
  // The fifth step of 16 columns is the first of the second slab; a step of 16 rows is two groups of eight.
  EXPECT_EQ(ColumnStepBytes(0x4000, 64, 4), 0x4000u);
  EXPECT_EQ(ColumnStepBytes(0x4000, 64, 3), 0x60u);
  EXPECT_EQ(ColumnStepBytes(0x4000, 32, 3), 0x4020u);
  EXPECT_EQ(RowStepBytes(64, 3), 0x1800u);
  EXPECT_EQ(RowStepBytes(32, 3), 0xc00u);
  // What lies further on has the same fields but for the address.
  EXPECT_EQ(DescriptorAt(kDescriptor, 0x4060), WgmmaDescriptor(0x30460, 16384, 64));
  EXPECT_EQ(DescriptorAt(kNarrow, 0xbc00), WgmmaDescriptor(0x38000, 7168, 32));  // near the end of the field
}

}  // namespace
}  // namespace meshfill
