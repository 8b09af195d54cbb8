#include "engine/model/model_shape.h"

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

double CountVisiblePairs(int64_t tokens, int64_t window) {
  int64_t pairs = 0;
  for (int64_t q = 0; q < tokens; ++q) {
    for (int64_t k = 0; k <= q; ++k) pairs += window == 0 || q - k < window;
  }
  return static_cast<double>(pairs);
}

TEST(VisiblePairs, EqualsCounting) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const int64_t tokens = Draw<int64_t>(random, 0, 120);
    const int64_t window = Draw<int64_t>(random, 0, 150);
    ASSERT_EQ(VisiblePairs(tokens, window), CountVisiblePairs(tokens, window))
        << "seed " << seed << ": " << tokens << " tokens, window " << window;
  }
}

TEST(VisiblePairs, OfTheLongestPromptDoesNotOverflow) {
  const double n = 2147483647.0;
  EXPECT_DOUBLE_EQ(VisiblePairs((int64_t{1} << 31) - 1, 0), n * (n + 1) / 2);
}

TEST(ModelFlops, CountsEveryMultiplyAddTwice) {
  const ModelShape model = {.layers = 3,
                            .hidden = 24,
                            .intermediate = 40,
                            .q_heads = 6,
                            .kv_heads = 2,
                            .head_dim = 8,
                            .vocab = 100,
                            .sliding_window = 5,
                            .windowed_layers = 2};
  const int64_t tokens = 17;
  // QKᵀ and PV: head_dim multiply-adds each, per pair and query head.
  const double pairs = CountVisiblePairs(tokens, 0) + 2 * CountVisiblePairs(tokens, 5);
  EXPECT_EQ(AttentionFlops(model, tokens), pairs * 6 * (8 + 8) * 2);
  const double weights =
      24 * (6 * 8) + 2 * 24 * (2 * 8) + (6 * 8) * 24 + 3 * 24 * 40;  // q; k, v; o; gate, up, down
  EXPECT_EQ(ModelFlops(model, tokens), AttentionFlops(model, tokens) + 2 * (3 * weights * tokens + 24 * 100));
}

TEST(ModelShape, CountsChunkBytes) {
  const ModelShape model = {.q_heads = 6, .kv_heads = 2, .head_dim = 8, .dtype = DType::kBf16};
  EXPECT_EQ(model.q_bytes(10), 10 * 6 * 8 * 2);
  EXPECT_EQ(model.kv_bytes(10), 2 * 10 * 2 * 8 * 2);
  EXPECT_EQ(model.partial_bytes(10, DType::kBf16), 10 * 6 * (8 * 2 + 4));
  EXPECT_EQ(model.partial_bytes(10, DType::kF32), 10 * 6 * (8 * 4 + 4));
}

}  // namespace
}  // namespace meshfill
