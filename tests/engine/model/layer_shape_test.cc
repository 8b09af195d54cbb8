#include "engine/model/layer_shape.h"

#include <algorithm>
#include <vector>

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
          .fused_projections = Draw(random, 0, 1) == 1,
          .post_norms = Draw(random, 0, 1) == 1,
          .qk_norm = Draw(random, 0, 1) == 1 ? QkNorm::kHead : QkNorm::kNone,
          .sinks = Draw(random, 0, 1) == 1};
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
    EXPECT_EQ(PairFlops(shape.q_heads, shape.head_dim), 2.0 * 2 * static_cast<double>(q));  // QKᵀ and PV
    const SliceWidths widths = SliceWidthsOf(shape);
    EXPECT_EQ(widths.normed, shape.hidden);
    EXPECT_EQ(widths.wide,
              std::max({q + 2 * kv, 2 * shape.intermediate, shape.post_norms ? shape.hidden : 0}));
    EXPECT_EQ(widths.narrow, std::max(q, shape.intermediate));
  }
}

TEST(LayerShape, CountsTheExpertsThatATokenUses) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 100; ++draw) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw);
    LayerShape shape = RandomShape(random);
    shape.mlp = MlpKind::kExperts;
    shape.experts.count = Draw(random, 1, 40);
    shape.experts.used = Draw(random, 1, shape.experts.count);
    shape.experts.width = Draw<int64_t>(random, 1, 90);
    shape.experts.shared_width = Draw<int64_t>(random, 0, 1) * Draw<int64_t>(random, 1, 90);
    shape.dtype = Draw(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16;
    shape.expert_bias = Draw(random, 0, 1) == 1;
    if (Draw(random, 0, 1) == 1) shape.expert_names.gate_up = "mlp.experts.gate_up_proj";
    const auto& [count, used, width, shared_width] = shape.experts;
    const int64_t q = shape.q_heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    const int64_t rest = shape.hidden * (2 * q + 2 * kv + count + 3 * shared_width);
    EXPECT_EQ(LayerMatrixElements(shape), rest + 3 * shape.hidden * width * count);
    EXPECT_EQ(LayerTokenFlops(shape), 2.0 * static_cast<double>(rest + 3 * shape.hidden * width * used));
    // All that goes through a buffer fits, and no more.
    const SliceWidths widths = SliceWidthsOf(shape);
    const auto dtype_bytes = static_cast<int64_t>(DTypeBytes(shape.dtype));
    const int64_t logits = count * 4 / dtype_bytes;
    const int64_t added = shape.post_norms ? shape.hidden * 4 / dtype_bytes : 0;
    EXPECT_EQ(widths.wide, std::max({q + 2 * kv, logits, added, used * std::max(2 * width, shape.hidden),
                                     2 * shared_width}));
    EXPECT_EQ(widths.narrow, std::max({q, used * width, shared_width}));
    EXPECT_EQ(widths.experts, shape.experts);
    EXPECT_EQ(SliceBytes(widths, 10, shape.dtype),
              10 * (widths.normed + widths.wide + widths.narrow) * dtype_bytes + 4 * (count + 1 + 30 * used));
  }
}

TEST(LayerShape, TheLargestLayerIsThatOfAnyKind) {
  const LayerForm dense, experts = {.mlp = MlpKind::kExperts};
  ModelShape model = {.layers = 3, .hidden = 64, .q_heads = 2, .kv_heads = 1, .head_dim = 8};
  model.vocab = 7;
  model.experts = {.count = 5, .used = 2, .width = 10, .shared_width = 0};
  model.kinds = LayerKindsOf(std::vector<LayerForm>{dense, experts, experts});
  for (const int64_t intermediate : {1, 1000}) {  // the experts are larger, or the dense MLP is
    model.intermediate = intermediate;
    const int64_t of_dense = LayerMatrixBytes(LayerShapeOf(model, dense), DType::kBf16);
    const int64_t of_experts = LayerMatrixBytes(LayerShapeOf(model, experts), DType::kBf16);
    const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
    EXPECT_EQ(bytes.layers, of_dense + 2 * of_experts);
    EXPECT_EQ(bytes.most_layer, std::max(of_dense, of_experts));
    EXPECT_EQ(bytes.head, 2 * 7 * 64);
    EXPECT_EQ(bytes.embedding, 2 * 7 * 64);
  }
}

// The forms are sorted by window: the largest, and the one with experts, may be any of them.
TEST(LayerShape, SlicesAreWideEnoughForEachLayer) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 50; ++draw) {
    ModelShape model = {.layers = 3, .hidden = 8, .q_heads = 2, .kv_heads = 1, .head_dim = 8};
    model.intermediate = Draw<int64_t>(random, 1, 100);
    model.experts = {.count = 5, .used = 2, .width = Draw<int64_t>(random, 1, 50)};
    std::vector<LayerForm> layers(3);
    for (LayerForm& layer : layers) {
      layer = {.window = Draw<int64_t>(random, 0, 1) * 7,
               .mlp = Draw(random, 0, 1) == 1 ? MlpKind::kExperts : MlpKind::kDense};
    }
    model.kinds = LayerKindsOf(layers);
    SliceWidths expected;
    for (const LayerForm& layer : layers) {
      const SliceWidths widths = SliceWidthsOf(LayerShapeOf(model, layer));
      expected.normed = std::max(expected.normed, widths.normed);
      expected.wide = std::max(expected.wide, widths.wide);
      expected.narrow = std::max(expected.narrow, widths.narrow);
      if (layer.mlp == MlpKind::kExperts) expected.experts = model.experts;
    }
    EXPECT_EQ(SliceWidthsOf(model), expected);
  }
}

TEST(LayerShape, AFormOfTheModelHasTheModelsNumbers) {
  ModelShape model = {.hidden = 64, .intermediate = 100, .q_heads = 4, .kv_heads = 2, .head_dim = 8};
  model.rope_dim = 6;
  model.experts = {.count = 5, .used = 2, .width = 10, .shared_width = 3};
  model.post_norms = true;
  model.activation = Activation::kGelu;
  model.fp8 = {.rows = 1, .columns = 2};
  model.fp4_experts = true;
  model.dtype = DType::kBf16;
  const LayerShape shape =
      LayerShapeOf(model, {.window = 9, .mlp = MlpKind::kExperts, .rope = LayerRope::kLocal});
  EXPECT_EQ(shape.q_width(), 32);
  EXPECT_EQ(shape.kv_width(), 16);
  EXPECT_EQ(shape.rotated_dim, 6);
  EXPECT_EQ(shape.window, 9);
  EXPECT_EQ(shape.mlp, MlpKind::kExperts);
  EXPECT_EQ(shape.rope, LayerRope::kLocal);
  EXPECT_EQ(shape.experts, model.experts);
  EXPECT_EQ(shape.router, (RouterRule{.experts = 5, .used = 2}));
  EXPECT_TRUE(shape.post_norms && shape.fp4_experts);
  EXPECT_EQ(shape.activation, Activation::kGelu);
  EXPECT_EQ(shape.fp8, model.fp8);
  EXPECT_EQ(shape.dtype, DType::kBf16);
}

TEST(LayerShape, CountsFp8AsBytesWithScales) {
  std::mt19937_64 random(TestSeed());
  LayerShape shape = RandomShape(random);
  shape.mlp = MlpKind::kExperts;
  shape.experts = {.count = 5, .used = 2, .width = 300, .shared_width = 0};
  shape.hidden = 200;
  EXPECT_EQ(LayerMatrixBytes(shape, DType::kBf16), 2 * LayerMatrixElements(shape));
  EXPECT_EQ(LayerMatrixBytes(shape, DType::kF32), 4 * LayerMatrixElements(shape));

  shape.fp8 = {.rows = 1, .columns = Fp8Blocks::kAll};
  const int64_t router = 5 * 200, rows = shape.qkv_width() + 200 + 5 * (2 * 300 + 200);
  EXPECT_EQ(LayerMatrixBytes(shape, DType::kBf16), LayerMatrixElements(shape) + router + 4 * rows);
  shape.fp8 = {.rows = 128, .columns = 128};
  const int64_t of_q_width = (shape.q_width() + 127) / 128;
  EXPECT_EQ(LayerMatrixBytes(shape, DType::kBf16),
            LayerMatrixElements(shape) + router +
                4 * (2 * (shape.qkv_width() + 5 * 600) + of_q_width * 200 + 3 * 5 * 200));

  // The largest layer's matrices once they are wide, but for the router, which is.
  ModelShape model = {.layers = 3, .hidden = 64, .q_heads = 2, .kv_heads = 1, .head_dim = 8};
  model.intermediate = 1000;
  model.experts = {.count = 5, .used = 2, .width = 10, .shared_width = 0};
  const LayerForm dense, experts = {.mlp = MlpKind::kExperts};
  model.kinds = LayerKindsOf(std::vector<LayerForm>{dense, experts, experts});
  model.fp8 = {.rows = 128, .columns = 128};
  EXPECT_EQ(MostWidenedBytes(model, DType::kBf16), 2 * LayerMatrixElements(LayerShapeOf(model, dense)));
  model.intermediate = 1;
  EXPECT_EQ(MostWidenedBytes(model, DType::kF32),
            4 * (LayerMatrixElements(LayerShapeOf(model, experts)) - 5 * 64));
}

TEST(LayerShape, CountsWideProductsOfAModelInFp8) {
  ModelShape model = {.layers = 3, .hidden = 64, .intermediate = 100, .q_heads = 2, .kv_heads = 1};
  model.head_dim = 8;
  model.fp8 = {.rows = 1, .columns = Fp8Blocks::kAll};
  LayerForm some;
  some.wide.Add(LayerPart::kO);
  some.wide.Add(LayerPart::kDown);
  model.kinds = LayerKindsOf(std::vector<LayerForm>{{}, some, some});
  EXPECT_EQ(model.kinds.size(), 2u);
  const int64_t o = 64 * 16, down = 64 * 100, scales = 4 * (32 + 64 + 200 + 64);
  const int64_t all = LayerMatrixElements(LayerShapeOf(model)), narrow = all + scales;
  const int64_t with_wide = narrow + o + down - 4 * (64 + 64);
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  EXPECT_EQ(bytes.layers, narrow + 2 * with_wide);
  EXPECT_EQ(bytes.most_layer, with_wide);
  EXPECT_EQ(MostWidenedBytes(model, DType::kBf16), 2 * all);
  model.kinds = LayerKindsOf(std::vector<LayerForm>{some, some, some});
  EXPECT_EQ(MostWidenedBytes(model, DType::kBf16), 2 * (all - o - down));
  EXPECT_EQ(MostWidenedProductBytes(model, DType::kBf16), 2 * 200 * 64);
}

TEST(LayerShape, CountsMxfp4AsHalfBytesWithScales) {
  std::mt19937_64 random(TestSeed());
  LayerShape shape = RandomShape(random);
  shape.mlp = MlpKind::kExperts;
  shape.experts = {.count = 5, .used = 2, .width = 96, .shared_width = 0};
  shape.hidden = 64;
  const int64_t experts = 5 * 3 * 64 * 96;
  const int64_t rest = LayerMatrixElements(shape) - experts;
  shape.fp4_experts = true;
  EXPECT_EQ(LayerMatrixBytes(shape, DType::kBf16), 2 * rest + experts / 2 + experts / 32);

  ModelShape model = {.layers = 3, .hidden = 64, .q_heads = 2, .kv_heads = 1, .head_dim = 8};
  model.experts = shape.experts;
  model.kinds = {LayerKind{.form = {.mlp = MlpKind::kExperts}, .layers = 3}};
  EXPECT_EQ(MostWidenedBytes(model, DType::kBf16), 0);
  model.fp4_experts = true;
  EXPECT_EQ(MostWidenedBytes(model, DType::kBf16), 2 * experts);
  EXPECT_EQ(MostWidenedProductBytes(model, DType::kBf16), 2 * experts / 3 * 2);  // gate and up
}

TEST(LayerShape, WeightModesHaveTheConfigurationsNames) {
  EXPECT_STREQ(WeightModeName(WeightMode::kResident), "resident");
  EXPECT_STREQ(WeightModeName(WeightMode::kStreamed), "streamed");
  EXPECT_STREQ(WeightModeName(WeightMode::kSharded), "sharded");
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

// Beside what is multiplied, in a buffer of the compute dtype.
TEST(LayerShape, HasRoomForWhatASublayerAddsInF32) {
  const LayerShape shape = {.hidden = 100,
                            .intermediate = 10,
                            .q_heads = 1,
                            .kv_heads = 1,
                            .head_dim = 8,
                            .post_norms = true,
                            .dtype = DType::kBf16};
  EXPECT_EQ(SliceWidthsOf(shape).wide, 200);
}

TEST(LayerShape, ListsNormsAndBiasesThatTheModelHas) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 20; ++draw) {
    const LayerShape shape = RandomShape(random);
    int norms = 0;
    bool sinks = false;
    for (const LayerTensor& tensor : LayerTensors(shape)) {
      norms += tensor.is_norm() ? 1 : 0;
      sinks = sinks || tensor.part == LayerPart::kSinks;
      const bool bias = tensor.part == LayerPart::kQkv ? shape.qkv_bias
                        : tensor.part == LayerPart::kO ? shape.o_bias
                                                       : shape.mlp_bias && !tensor.is_vector();
      EXPECT_EQ(tensor.bias, bias) << tensor.name;
    }
    EXPECT_EQ(norms, 2 + (shape.qk_norm == QkNorm::kHead ? 2 : 0) + (shape.post_norms ? 2 : 0));
    EXPECT_EQ(sinks, shape.sinks);
  }
}

}  // namespace
}  // namespace meshfill
