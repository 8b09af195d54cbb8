#include "engine/model/model_shape.h"

#include <utility>

#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"
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
  ModelShape model = {.layers = 3,
                      .hidden = 24,
                      .intermediate = 40,
                      .q_heads = 6,
                      .kv_heads = 2,
                      .head_dim = 8,
                      .vocab = 100};
  SetWindow(model, 5, 2);
  const int64_t tokens = 17;
  // QKᵀ and PV: head_dim multiply-adds each, per pair and query head.
  const double pairs = CountVisiblePairs(tokens, 0) + 2 * CountVisiblePairs(tokens, 5);
  EXPECT_EQ(AttentionFlops(model, tokens), pairs * 6 * (8 + 8) * 2);
  const double weights =
      24 * (6 * 8) + 2 * 24 * (2 * 8) + (6 * 8) * 24 + 3 * 24 * 40;  // q; k, v; o; gate, up, down
  EXPECT_EQ(ModelFlops(model, tokens), AttentionFlops(model, tokens) + 2 * (3 * weights * tokens + 24 * 100));
}

// Of the experts, those that a token uses, and the router over all of them.
TEST(ModelFlops, CountsActivatedExperts) {
  ModelShape model = {.layers = 3,
                      .hidden = 24,
                      .intermediate = 40,
                      .q_heads = 6,
                      .kv_heads = 2,
                      .head_dim = 8,
                      .vocab = 100,
                      .experts = {.count = 5, .used = 3, .width = 7, .shared_width = 11}};
  const LayerForm dense, experts = {.mlp = MlpKind::kExperts};
  const LayerForm layers[] = {dense, experts, experts};
  model.kinds = LayerKindsOf(layers);
  const double attention = 24 * (6 * 8) + 2 * 24 * (2 * 8) + (6 * 8) * 24;
  const double of_experts = 24 * 5 + 3 * 24 * 11 + 3 * (3 * 24 * 7);
  EXPECT_EQ(ProjectionFlopsPerToken(model), 2 * (3 * attention + 3 * 24 * 40 + 2 * of_experts));
  EXPECT_EQ(AttentionFlops(model, 17), 3 * CountVisiblePairs(17, 0) * 6 * (8 + 8) * 2);
}

TEST(LayerKinds, AreSortedByWindowAndCounted) {
  const LayerForm full, windowed = {.window = 7}, experts = {.window = 7, .mlp = MlpKind::kExperts};
  const LayerForm layers[] = {experts, windowed, full, windowed};
  ModelShape model = {.layers = 4};
  model.kinds = LayerKindsOf(layers);
  EXPECT_EQ(model.kinds, (std::vector<LayerKind>{{full, 1}, {windowed, 2}, {experts, 1}}));
  std::vector<std::pair<int64_t, int>> windows;
  model.ForEachWindow([&](int64_t window, int count) { windows.emplace_back(window, count); });
  EXPECT_EQ(windows, (std::vector<std::pair<int64_t, int>>{{0, 1}, {7, 3}}));
}

TEST(LayerKinds, AreOfOneWindowWhateverTheirRope) {
  const LayerForm full, local = {.window = 7, .rope = LayerRope::kLocal}, windowed = {.window = 7};
  ModelShape model = {.layers = 4};
  EXPECT_EQ(model.rope_count(), 1);
  model.kinds = LayerKindsOf(std::vector<LayerForm>{local, full, windowed, local});
  EXPECT_EQ(model.kinds, (std::vector<LayerKind>{{full, 1}, {windowed, 1}, {local, 2}}));
  EXPECT_EQ(model.rope_count(), 2);
  std::vector<std::pair<int64_t, int>> windows;
  model.ForEachWindow([&](int64_t window, int count) { windows.emplace_back(window, count); });
  EXPECT_EQ(windows, (std::vector<std::pair<int64_t, int>>{{0, 1}, {7, 3}}));
}

TEST(ModelShape, ScoresAreOverTheRootOfTheHeadOrOfWhatTheModelSays) {
  ModelShape model = {.head_dim = 64};
  EXPECT_EQ(model.score_scale(), 0.125f);
  model.score_scalar = 256;
  EXPECT_EQ(model.score_scale(), 0.0625f);
}

TEST(ModelShape, HeadGroupsDivideTheHeadsOrHaveOneKvHeadEach) {
  const ModelShape model = {.q_heads = 8, .kv_heads = 2};
  for (const auto& [groups, kv_heads] : {std::pair{1, 2}, {2, 1}, {4, 1}, {8, 1}}) {
    EXPECT_EQ(model.HeadSlice(groups).q_heads, 8 / groups);
    EXPECT_EQ(model.HeadSlice(groups).kv_heads, kv_heads) << groups;
  }
  for (const auto& [q_heads, kv_heads] : {std::pair{12, 4}, {12, 6}, {12, 1}, {6, 3}}) {
    const ModelShape some = {.q_heads = q_heads, .kv_heads = kv_heads};
    for (int groups = -1; groups <= 13; ++groups) {
      const bool kv_fit = groups > 0 && (kv_heads % groups == 0 || groups % kv_heads == 0);
      EXPECT_EQ(some.CanSplitHeads(groups), kv_fit && q_heads % groups == 0)
          << groups << " groups of " << q_heads << " and " << kv_heads << " heads";
    }
  }
}

TEST(ModelShape, ComputesInF32WhereTheWeightsAre) {
  EXPECT_EQ(AutoDType(true), DType::kF32);
  EXPECT_EQ(AutoDType(false), DType::kBf16);
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
