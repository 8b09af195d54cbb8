#include "kernels/band.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "tests/kernels/random_band.h"

namespace meshfill {
namespace {

TEST(SlotPositionsTest, StripesAreDealtInTurn) {
  const SlotPositions second_of_three{.base = 1, .stride = 3, .width = 4};
  const int64_t expected[] = {4, 5, 6, 7, 16, 17, 18, 19, 28};
  for (int64_t slot = 0; slot < 9; ++slot) EXPECT_EQ(second_of_three.At(slot), expected[slot]);
}

// The table of layouts, for stripes x of Q chunk i and y of KV chunk j.
TEST(BandTest, StripedLayoutFollowsTheTable) {
  constexpr int64_t kWidth = 4, kRanks = 3;
  for (int64_t i = 0; i < kRanks; ++i) {
    for (int64_t j = 0; j < kRanks; ++j) {
      const Band band{.q = {i, kRanks, kWidth}, .k = {j, kRanks, kWidth}};
      for (int64_t q = 0; q < 5 * kWidth; ++q) {
        for (int64_t k = 0; k < 5 * kWidth; ++k) {
          const int64_t x = q / kWidth, y = k / kWidth;
          const bool visible = y < x || (y == x && (j < i || (j == i && k <= q)));
          EXPECT_EQ(band.Visible(q, k), visible) << "i " << i << " j " << j << " q " << q << " k " << k;
        }
      }
    }
  }
}

TEST(BandTest, AWindowCountsTheQueryItself) {
  const Band band{.window = 3};
  for (int64_t k = 0; k < 20; ++k) EXPECT_EQ(band.Visible(10, k), k == 8 || k == 9 || k == 10);
}

TEST(BandTest, ClassifyNeverContradictsVisible) {
  const uint32_t seed = TestSeed();
  std::mt19937 random(seed);
  int partial = 0, certain = 0;
  for (int draw = 0; draw < 3000; ++draw) {
    const int64_t q_tokens = Draw(random, 1, 150), k_tokens = Draw(random, 1, 150);
    const Band band = RandomBand(random, q_tokens, k_tokens);
    const int64_t q_begin = Draw(random, 0, q_tokens - 1), q_end = Draw(random, q_begin + 1, q_tokens);
    const int64_t k_begin = Draw(random, 0, k_tokens - 1), k_end = Draw(random, k_begin + 1, k_tokens);
    int64_t visible = 0;
    for (int64_t q = q_begin; q < q_end; ++q) {
      for (int64_t k = k_begin; k < k_end; ++k) visible += band.Visible(q, k);
    }
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", ", DebugString(band), ", q ", q_begin, "–", q_end, ", k ",
                              k_begin, "–", k_end, ", visible ", visible));
    const int64_t pairs = (q_end - q_begin) * (k_end - k_begin);
    switch (band.Classify(q_begin, q_end, k_begin, k_end)) {
      case TileVisibility::kHidden:
        EXPECT_EQ(visible, 0);
        break;
      case TileVisibility::kWhole:
        EXPECT_EQ(visible, pairs);
        break;
      case TileVisibility::kPartial:
        partial += 1;
        continue;
    }
    certain += 1;
  }
  EXPECT_GT(partial, 0);
  EXPECT_GT(certain, partial / 4) << "kPartial must not be the answer to everything";
}

// Within one stripe of queries and one of keys, the corners decide: no tile is called partial for nothing.
TEST(BandTest, ClassifyIsExactInsideAStripe) {
  for (int64_t i = 0; i < 3; ++i) {
    const Band band{.q = {i, 3, 8}, .k = {1, 3, 8}};
    const TileVisibility expected = i < 1   ? TileVisibility::kHidden
                                    : i > 1 ? TileVisibility::kWhole
                                            : TileVisibility::kPartial;
    EXPECT_EQ(band.Classify(8, 16, 8, 16), expected);
  }
}

}  // namespace
}  // namespace meshfill
