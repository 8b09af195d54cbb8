#include "engine/model/layer_shape.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

LayerShape RandomShape(std::mt19937_64& random) {
  const int kv_heads = Draw(random, 1, 8);
  return {.hidden = Draw<int64_t>(random, 1, 200),
          .intermediate = Draw<int64_t>(random, 1, 300),
          .q_heads = kv_heads * Draw(random, 1, 6),
          .kv_heads = kv_heads,
          .head_dim = 2 * Draw(random, 1, 64),
          .qkv_bias = Draw(random, 0, 1) == 1,
          .o_bias = Draw(random, 0, 1) == 1,
          .mlp_bias = Draw(random, 0, 1) == 1,
          .qk_norm = Draw(random, 0, 1) == 1};
}

TEST(LayerShape, CountsWhatTheEquationsMultiply) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 100; ++draw) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw);
    const LayerShape shape = RandomShape(random);
    const int64_t q = shape.q_heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    const int64_t elements =
        shape.hidden * (q + 2 * kv) + q * shape.hidden + 3 * shape.hidden * shape.intermediate;
    EXPECT_EQ(LayerMatrixElements(shape), elements);
    EXPECT_EQ(LayerTokenFlops(shape), 2.0 * static_cast<double>(elements));
    EXPECT_EQ(LayerPairFlops(shape), 2.0 * 2 * static_cast<double>(q));  // QKᵀ and PV
    const SliceWidths widths = SliceWidthsOf(shape);
    EXPECT_EQ(widths.normed, shape.hidden);
    EXPECT_EQ(widths.wide, std::max(q + 2 * kv, 2 * shape.intermediate));
    EXPECT_EQ(widths.narrow, std::max(q, shape.intermediate));
  }
}

TEST(LayerShape, StacksTheLinearLayersOfAProduct) {
  std::mt19937_64 random(TestSeed());
  const LayerShape shape = RandomShape(random);
  const ProductShape qkv = ProductOf(shape, LayerPart::kQkv), gate_up = ProductOf(shape, LayerPart::kGateUp);
  EXPECT_EQ(qkv.out_features, shape.qkv_width());
  EXPECT_EQ(qkv.in_features, shape.hidden);
  EXPECT_EQ(gate_up.out_features, 2 * shape.intermediate);
  EXPECT_EQ(ProductOf(shape, LayerPart::kO).in_features, shape.q_width());
  EXPECT_EQ(ProductOf(shape, LayerPart::kDown).in_features, shape.intermediate);
}

TEST(LayerShape, ListsNormsAndBiasesThatTheModelHas) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 20; ++draw) {
    const LayerShape shape = RandomShape(random);
    int norms = 0;
    for (const LayerTensor& tensor : LayerTensors(shape)) {
      norms += tensor.is_norm() ? 1 : 0;
      const bool bias = tensor.part == LayerPart::kQkv ? shape.qkv_bias
                        : tensor.part == LayerPart::kO ? shape.o_bias
                                                       : shape.mlp_bias && !tensor.is_norm();
      EXPECT_EQ(tensor.bias, bias) << tensor.name;
    }
    EXPECT_EQ(norms, shape.qk_norm ? 4 : 2);
  }
}

}  // namespace
}  // namespace meshfill
