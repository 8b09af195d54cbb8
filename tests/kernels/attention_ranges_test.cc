#include "kernels/cpu/attention_ranges.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "tests/kernels/random_band.h"

namespace meshfill {
namespace {

TEST(AttentionRangesTest, VisibleKeysAreThoseThatTheBandShows) {
  const uint32_t seed = TestSeed();
  std::mt19937 random(seed);
  for (int draw = 0; draw < 400; ++draw) {
    const int64_t q_tokens = Draw(random, 1, 100), k_tokens = Draw(random, 0, 200);
    const Band band = RandomBand(random, q_tokens, k_tokens);
    KeyRange previous{0, 0};
    for (int64_t q = 0; q < q_tokens; ++q) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, ", ", DebugString(band), ", q ", q, ", keys ", k_tokens));
      const KeyRange range = VisibleKeys(band, q, k_tokens);
      ASSERT_LE(0, range.begin);
      ASSERT_LE(range.begin, range.end);
      ASSERT_LE(range.end, k_tokens);
      for (int64_t k = 0; k < k_tokens; ++k) {
        ASSERT_EQ(range.begin <= k && k < range.end, band.Visible(q, k)) << "key " << k;
      }
      ASSERT_LE(previous.begin, range.begin);
      ASSERT_LE(previous.end, range.end);
      previous = range;
    }
  }
}

TEST(AttentionRangesTest, SlotsBeforeCountsAcrossStripes) {
  constexpr SlotPositions kSlots{.base = 2, .stride = 3, .width = 4};  // 8–11, 20–23, 32–35, …
  EXPECT_EQ(SlotsBefore(kSlots, -5, 100), 0);
  EXPECT_EQ(SlotsBefore(kSlots, 8, 100), 0);
  EXPECT_EQ(SlotsBefore(kSlots, 9, 100), 1);
  EXPECT_EQ(SlotsBefore(kSlots, 15, 100), 4);
  EXPECT_EQ(SlotsBefore(kSlots, 22, 100), 6);
  EXPECT_EQ(SlotsBefore(kSlots, int64_t{1} << 31, 6), 6);
}

}  // namespace
}  // namespace meshfill
