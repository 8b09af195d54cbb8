#include "kernels/cpu/layer_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/random_tensor.h"
#include "tests/kernels/simd_target.h"

namespace meshfill {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// What random inputs do not reach, on every instruction set; CpuStreamTest has the operations on random
// inputs.
class LayerOpsTest : public testing::TestWithParam<int64_t> {
 private:
  ScopedSimdTarget target_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Targets, LayerOpsTest, testing::ValuesIn(SimdTargets()),
                         [](const auto& param) { return std::string(hwy::TargetName(param.param)); });

TEST_P(LayerOpsTest, EveryHalfWidensExactly) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> widened(halves.size());
  ConvertValues(halves.data(), DType::kF16, std::ssize(halves), DType::kF32, widened.data());
  for (size_t i = 0; i < halves.size(); ++i) {
    const float expected = HalfToFloat(halves[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(widened[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(widened[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  }
}

TEST_P(LayerOpsTest, EveryBfloat16WidensExactly) {
  std::vector<uint16_t> narrow(1 << 16);
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = static_cast<uint16_t>(i);
  std::vector<uint32_t> widened(narrow.size());
  ConvertValues(narrow.data(), DType::kBf16, std::ssize(narrow), DType::kF32, widened.data());
  for (size_t i = 0; i < narrow.size(); ++i) EXPECT_EQ(widened[i], uint32_t{narrow[i]} << 16);
}

TEST_P(LayerOpsTest, RoundsToNearestEvenWhateverTheBits) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  std::mt19937_64 random(seed);
  std::vector<float> values = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, -kNaN, 0x1p-149f, 0x1.fffffep127f};
  for (uint32_t upper = 0; upper < 1 << 16; upper += 7) {  // halfway, and next to it
    for (const uint32_t lower : {0x7fff, 0x8000, 0x8001})
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
  }
  for (int i = 0; i < 20001; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  std::vector<BFloat16> rounded(values.size());
  ConvertValues(values.data(), DType::kF32, std::ssize(values), DType::kBf16, rounded.data());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(rounded[i].bits, BFloat16::FromFloat(values[i]).bits) << std::bit_cast<uint32_t>(values[i]);
  }
}

// Rows that are aligned and not, of whole vectors and not, with what lies between them untouched.
TEST_P(LayerOpsTest, RoundsRowsPastTheCaches) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 40; ++draw) {
    const bool aligned = draw % 2 == 0;
    const int64_t rows = Draw(random, 0, 9), columns = Draw(random, 1, 200);
    const int64_t stride = aligned ? 256 : columns + Draw(random, 0, 50),
                  first = aligned ? 0 : Draw(random, 0, 40);
    const Tensor from = Tensor::Normal(random, DType::kF32, rows * columns);
    std::vector<BFloat16> storage(first + rows * stride + 64, BFloat16{0x7fff});
    auto* to = storage.data();
    while (reinterpret_cast<uintptr_t>(to) % 64 != 0) ++to;
    RoundRowsPastCaches(from.data<float>(), rows, columns, stride, to + first);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < stride; ++column) {
        const uint16_t expected =
            column < columns ? BFloat16::FromFloat(from.At(row * columns + column)).bits : 0x7fff;
        ASSERT_EQ(to[first + row * stride + column].bits, expected) << row << ", " << column;
      }
    }
  }
}

TEST_P(LayerOpsTest, SwiGluIsAccurateOverTheWholeRange) {
  std::vector<float> gates;
  for (float gate = -86.0f; gate <= 120.0f; gate += 0.0037f) gates.push_back(gate);
  std::vector<float> x = gates, y(gates.size());
  x.resize(2 * gates.size(), 1.0f);  // up
  ActivateTokens({.activation = {.gating = Gating::kSwiGlu},
                  .x = x.data(),
                  .tokens = 1,
                  .width = std::ssize(gates),
                  .y = y.data()},
                 DType::kF32);
  for (size_t i = 0; i < gates.size(); ++i) {
    const double expected = gates[i] / (1 + std::exp(-static_cast<double>(gates[i])));
    EXPECT_NEAR(y[i], expected, 1e-6 * std::abs(expected)) << gates[i];
  }
}

TEST_P(LayerOpsTest, GeGluIsAccurateOverTheWholeRange) {
  std::vector<float> gates;
  for (float gate = -10.0f; gate <= 20.0f; gate += 0.0007f) gates.push_back(gate);
  std::vector<float> x = gates, y(gates.size());
  x.resize(2 * gates.size(), 1.0f);  // up
  ActivateTokens({.activation = {.gating = Gating::kGeGlu},
                  .x = x.data(),
                  .tokens = 1,
                  .width = std::ssize(gates),
                  .y = y.data()},
                 DType::kF32);
  for (size_t i = 0; i < gates.size(); ++i) {
    const double gate = gates[i], u = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
    const double expected = gate / (1 + std::exp(-2 * u));  // gate/2 · (1 + tanh u), without its cancellation
    EXPECT_NEAR(y[i], expected, 3e-5 * std::abs(expected)) << gate;  // 60 ulp of u, where it is large
    EXPECT_NEAR(y[i], gate / 2 * (1 + std::tanh(u)), 1e-6 * std::abs(gate)) << gate;
  }
}

TEST_P(LayerOpsTest, GeGluAtItsEnds) {
  std::vector<float> x = {-12.0f, -104.5f, -1e4f, -std::numeric_limits<float>::max(),
                          1e30f,  kNaN,    0.0f,  2.0f};
  const int64_t width = std::ssize(x);
  x.resize(2 * width, 1.0f);
  x.back() = kNaN;
  std::vector<float> y(width);
  ActivateTokens(
      {.activation = {.gating = Gating::kGeGlu}, .x = x.data(), .tokens = 1, .width = width, .y = y.data()},
      DType::kF32);
  for (int i = 0; i < 4; ++i) {
    EXPECT_LE(y[i], 0);
    EXPECT_GE(y[i], -1e-6f);
  }
  EXPECT_EQ(y[4], 1e30f);
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_EQ(y[6], 0);
  EXPECT_TRUE(std::isnan(y[7]));
}

TEST_P(LayerOpsTest, SwiGluAtItsEnds) {
  std::vector<float> x = {-88.5f, -104.5f, -1e4f, -std::numeric_limits<float>::max(),
                          1e30f,  kNaN,    0.0f,  2.0f};
  const int64_t width = std::ssize(x);
  x.resize(2 * width, 1.0f);
  x.back() = kNaN;
  std::vector<float> y(width);
  ActivateTokens(
      {.activation = {.gating = Gating::kSwiGlu}, .x = x.data(), .tokens = 1, .width = width, .y = y.data()},
      DType::kF32);
  for (int i = 0; i < 4; ++i) {
    EXPECT_LE(y[i], 0);
    EXPECT_GE(y[i], -1e-30f);
  }
  EXPECT_EQ(y[4], 1e30f);
  EXPECT_TRUE(std::isnan(y[5]));  // a broken activation must show in the logits
  EXPECT_EQ(y[6], 0);
  EXPECT_TRUE(std::isnan(y[7]));
}

TEST_P(LayerOpsTest, ClampedSwiGluAtItsEnds) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const struct {
    float gate, up, expected;
  } pairs[] = {{-1e4f, 1, 0},           {-kMax, 1, 0},    {0, 5, 0},       {7, 1e4f, 56},   {kMax, 7, 56},
               {kInfinity, -1e4f, -42}, {70, -kMax, -42}, {kNaN, 1, kNaN}, {1, kNaN, kNaN}, {2, -1, 0}};
  std::vector<float> x;
  for (const auto& pair : pairs) x.insert(x.end(), {pair.gate, pair.up});
  const int64_t width = std::ssize(x) / 2;
  std::vector<float> y(width);
  ActivateTokens({.activation = {.gating = Gating::kClampedSwiGlu, .alpha = 1.702f, .limit = 7},
                  .x = x.data(),
                  .tokens = 1,
                  .width = width,
                  .y = y.data()},
                 DType::kF32);
  for (int64_t i = 0; i < width; ++i) {
    if (std::isnan(pairs[i].expected)) {
      EXPECT_TRUE(std::isnan(y[i])) << i;  // a broken activation must show in the logits
    } else {
      EXPECT_NEAR(y[i], pairs[i].expected, 1e-3) << i;
    }
  }
}

// The gate is bounded from above alone, the other factor on both sides.
TEST_P(LayerOpsTest, ClampedSwiGluBoundsTheGateFromAbove) {
  const std::vector<float> x = {-3, 0.5f, -1.5f, 4, 0.25f, -0.5f, 3, -5};  // gate and up in turn
  std::vector<float> y(x.size() / 2);
  ActivateTokens({.activation = {.gating = Gating::kClampedSwiGlu, .alpha = 1.702f, .limit = 1},
                  .x = x.data(),
                  .tokens = 1,
                  .width = std::ssize(y),
                  .y = y.data()},
                 DType::kF32);
  for (size_t i = 0; i < y.size(); ++i) {
    const double gate = std::min(x[2 * i], 1.0f), up = std::clamp(x[2 * i + 1], -1.0f, 1.0f);
    EXPECT_NEAR(y[i], gate / (1 + std::exp(-1.702 * gate)) * (up + 1), 1e-6) << i;
  }
}

TEST_P(LayerOpsTest, SinksAtTheirEnds) {
  // No key seen; a sink that is nothing beside the keys; one beside which they are nothing; equal ones.
  const std::vector<float> lse = {-kInfinity, 50, -3, 2}, sinks = {1, -60, 120, 2};
  std::vector<float> o = {0, 0, 7, 7, 7, 7, 7, 7};
  ApplySinksRows(
      {.o = o.data(), .lse = lse.data(), .sinks = sinks.data(), .heads = 4, .tokens = 1, .head_dim = 2}, 0,
      4);
  EXPECT_EQ(o, (std::vector<float>{0, 0, 7, 7, 0, 0, 3.5f, 3.5f}));
}

TEST_P(LayerOpsTest, RowsThatHaveSeenNoKeyMergeWithoutNaN) {
  constexpr int kHeadDim = 19;
  std::vector<float> o(4 * kHeadDim, 0.0f), other_o(4 * kHeadDim, 0.0f);
  std::vector<float> lse = {-kInfinity, -kInfinity, 3.0f, 1.0f},
                     other_lse = {-kInfinity, 2.0f, -kInfinity, 1.0f};
  std::fill_n(other_o.begin() + kHeadDim, kHeadDim, 5.0f);
  std::fill_n(o.begin() + 2 * kHeadDim, kHeadDim, 7.0f);
  std::fill_n(o.begin() + 3 * kHeadDim, kHeadDim, 1.0f);
  std::fill_n(other_o.begin() + 3 * kHeadDim, kHeadDim, 3.0f);
  MergePartialRows({.o = o.data(),
                    .lse = lse.data(),
                    .other_o = other_o.data(),
                    .other_dtype = DType::kF32,
                    .other_lse = other_lse.data(),
                    .rows = 4,
                    .head_dim = kHeadDim},
                   0, 4);
  EXPECT_EQ(lse[0], -kInfinity);
  EXPECT_EQ(lse[1], 2.0f);
  EXPECT_EQ(lse[2], 3.0f);
  EXPECT_FLOAT_EQ(lse[3], 1.0f + std::log(2.0f));
  const float expected[] = {0, 5, 7, 2};
  for (int i = 0; i < 4 * kHeadDim; ++i) EXPECT_FLOAT_EQ(o[i], expected[i / kHeadDim]);
}

TEST_P(LayerOpsTest, ScoresFarApartMergeWithoutOverflow) {
  float o = 1, lse = 3e38f;
  const float other_o = 2, other_lse = -3e38f;
  MergePartialRows({.o = &o,
                    .lse = &lse,
                    .other_o = &other_o,
                    .other_dtype = DType::kF32,
                    .other_lse = &other_lse,
                    .rows = 1,
                    .head_dim = 1},
                   0, 1);
  EXPECT_EQ(o, 1);
  EXPECT_EQ(lse, 3e38f);
}

// One row of a constant: mean(x²) is its square, at any width.
TEST_P(LayerOpsTest, RmsNormOfAConstantIsTheWeight) {
  for (int64_t width = 1; width < 100; ++width) {
    const std::vector<float> x(width, -4.0f), weight(width, 3.0f);
    std::vector<float> y(width + 1, kNaN);
    RmsNormRows(x.data(), weight.data(), 1, width, 0.0f, DType::kF32, y.data());
    for (int64_t i = 0; i < width; ++i) EXPECT_FLOAT_EQ(y[i], -3.0f);
    EXPECT_TRUE(std::isnan(y[width]));
  }
}

}  // namespace
}  // namespace meshfill
