#include "kernels/cpu/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "kernels/cpu/narrow_matrix.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/packed_matrix.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/narrow_layers.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

// A linear layer whose rows come from one to three sources of any dtype, with a bias or without.
struct Layer {
  int64_t in_features, out_features = 0;
  std::vector<Tensor> weights, biases;
  std::vector<WeightRows> rows;

  Layer(std::mt19937_64& random, int64_t in_features, int64_t max_rows) : in_features(in_features) {
    const int64_t sources = Draw(random, 1, 3);
    for (int64_t i = 0; i < sources; ++i) {
      const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(random, 0, 2)];
      const int64_t count = Draw(random, 1, max_rows);
      weights.push_back(Tensor::Normal(random, dtype, count * in_features));
      biases.push_back(Tensor::Normal(random, DType::kF32, count));
      out_features += count;
    }
    for (int64_t i = 0; i < sources; ++i) {
      const bool bias = Draw(random, 0, 1) == 1;
      rows.push_back({.data = weights[i].data(),
                      .dtype = weights[i].dtype(),
                      .rows = biases[i].count(),
                      .bias = bias ? biases[i].data<float>() : nullptr});
    }
  }
};

class GemmTest : public testing::TestWithParam<DType> {
 protected:
  // Of a sum of `in_features` products of normal numbers: n additions round partial sums of up to √n.
  static double Tolerance(int64_t in_features) {
    const auto n = static_cast<double>(in_features);
    return std::max(2e-6 * std::sqrt(n), 1.2e-7 * n);
  }

  // The product with so many random tokens is the reference's, with flags that are drawn.
  static void ExpectAgrees(CpuGemm& gemm, const PackedWeight& weight, const LoneStream& reference,
                           const PackedWeight& reference_weight, int64_t tokens, double tolerance,
                           std::mt19937_64& random) {
    const bool accumulate = Draw(random, 0, 1) == 1;
    const DType y_dtype = accumulate || Draw(random, 0, 1) == 1 ? DType::kF32 : GetParam();
    const Tensor x = Tensor::Normal(random, GetParam(), tokens * weight.in_features());
    Tensor y = accumulate ? Tensor::Normal(random, y_dtype, tokens * weight.out_features())
                          : Tensor(y_dtype, tokens * weight.out_features());
    Tensor expected = y;
    GemmArgs args{.weight = &weight,
                  .x = x.data(),
                  .tokens = tokens,
                  .y = y.data(),
                  .y_dtype = y_dtype,
                  .accumulate = accumulate};
    const absl::Status status = gemm.Run(args, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    args.weight = &reference_weight;
    args.y = expected.data();
    ASSERT_TRUE(reference->Gemm(args).ok());
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << weight.in_features() << " to "
                                    << weight.out_features() << (accumulate ? ", accumulated" : ""));
    ExpectClose(y, expected, tolerance);
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, GemmTest, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& param) { return DTypeName(param.param); });

TEST_P(GemmTest, AgreesWithTheReference) {
  const LoneStream reference = ReferenceStream(GetParam());
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 40; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    PackTeam team(static_cast<int>(Draw(random, 1, 3)));
    CpuGemm gemm(GetParam(), team.pool);
    // On AMX, more than 512 input features are multiplied in blocks.
    const bool wide = draw % 8 == 7;
    const Layer layer(random, Draw(random, 1, wide ? 2100 : 300), wide ? 500 : 90);
    const auto weight = PackMatrix(layer.rows, layer.in_features, GetParam(), team);
    const auto reference_weight = reference.device().PackWeight(layer.rows, layer.in_features);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ((*weight)->out_features(), layer.out_features);
    EXPECT_EQ((*weight)->in_features(), layer.in_features);
    for (int call = 0; call < 3; ++call) {  // other token counts and flags with the same weight
      const int64_t tokens = draw % 4 == 0 ? call : Draw(random, 0, 300);
      ExpectAgrees(gemm, **weight, reference, **reference_weight, tokens, Tolerance(layer.in_features),
                   random);
      if (HasFatalFailure()) return;
    }
  }
}

// The LM head: one token, many panels of output features, the last of them short.
TEST_P(GemmTest, OneTokenOverManyOutputFeatures) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  std::mt19937_64 random(seed);
  PackTeam team(2);
  CpuGemm gemm(GetParam(), team.pool);
  const LoneStream reference = ReferenceStream(GetParam());
  for (const int64_t in_features : {int64_t{64}, Draw(random, 1, 99), Draw(random, 513, 1600)}) {
    const Layer layer(random, in_features, 1500);
    const auto weight = PackMatrix(layer.rows, in_features, GetParam(), team);
    const auto reference_weight = reference.device().PackWeight(layer.rows, in_features);
    ASSERT_TRUE(weight.ok()) << weight.status();
    const Tensor x = Tensor::Normal(random, GetParam(), in_features);
    Tensor y(DType::kF32, layer.out_features), expected = y;
    GemmArgs args{.weight = weight->get(),
                  .x = x.data(),
                  .tokens = 1,
                  .y = y.data(),
                  .y_dtype = DType::kF32,
                  .accumulate = false};
    ASSERT_TRUE(gemm.Run(args, nullptr).ok());
    args.weight = reference_weight->get();
    args.y = expected.data();
    ASSERT_TRUE(reference->Gemm(args).ok());
    ExpectClose(y, expected, Tolerance(in_features));
  }
}

// However the rows come, and wherever a row of tokens is cut at panels, the product's bits are the same.
TEST_P(GemmTest, RowsThatAreReadAndPartsOfPanelsGiveTheSameBits) {
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 10; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    PackTeam team(static_cast<int>(Draw(random, 1, 3)));
    CpuGemm gemm(GetParam(), team.pool);
    const Layer layer(random, Draw(random, 1, draw % 3 == 0 ? 1200 : 200), 900);
    const auto product = [&](std::span<const WeightRows> rows) {
      const auto weight = PackMatrix(rows, layer.in_features, GetParam(), team);
      EXPECT_TRUE(weight.ok()) << weight.status();
      std::mt19937_64 same(seed);
      const Tensor x = Tensor::Normal(same, GetParam(), layer.in_features);
      std::vector<float> y((*weight)->out_features());
      EXPECT_TRUE(gemm.Run({.weight = weight->get(),
                            .x = x.data(),
                            .tokens = 1,
                            .y = y.data(),
                            .y_dtype = DType::kF32},
                           nullptr)
                      .ok());
      return y;
    };
    std::vector<FileRows> sources;
    for (const Tensor& tensor : layer.weights) {
      sources.emplace_back(tensor, layer.in_features * static_cast<int64_t>(DTypeBytes(tensor.dtype())));
    }
    std::vector<WeightRows> read = layer.rows;
    for (size_t i = 0; i < read.size(); ++i) {
      read[i].data = nullptr;
      read[i].source = &sources[i];
    }
    const std::vector<float> expected = product(layer.rows);
    EXPECT_EQ(product(read), expected);

    WeightRows whole = layer.rows[0];
    const std::vector<float> of_first = product({&whole, 1});
    if (whole.rows > kPanelFeatures) {
      const int64_t row_bytes = layer.in_features * static_cast<int64_t>(DTypeBytes(whole.dtype));
      const WeightRows rest = {.data = static_cast<const std::byte*>(whole.data) + kPanelFeatures * row_bytes,
                               .dtype = whole.dtype,
                               .rows = whole.rows - kPanelFeatures,
                               .bias = whole.bias == nullptr ? nullptr : whole.bias + kPanelFeatures};
      WeightRows first = whole;
      first.rows = kPanelFeatures;
      std::vector<float> parts = product({&first, 1});
      for (const float y : product({&rest, 1})) parts.push_back(y);
      EXPECT_EQ(parts, of_first);
    }

    sources.back().fails_at = Draw(random, int64_t{0}, read.back().rows);
    const auto failed = PackMatrix(read, layer.in_features, GetParam(), team);
    EXPECT_TRUE(absl::IsDataLoss(failed.status())) << failed.status();
  }
}

TEST(Fp8, EveryValueIsWhatItsBitsSay) {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = Fp8ToFloat(static_cast<uint8_t>(bits));
    const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) {
      EXPECT_TRUE(std::isnan(value));
      continue;
    }
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    EXPECT_EQ(value, bits >= 128 ? -magnitude : magnitude) << bits;
  }
}

TEST_P(GemmTest, Fp8AgreesWithTheReference) {
  const LoneStream reference = ReferenceStream(GetParam());
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 30; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    PackTeam team(static_cast<int>(Draw(random, 1, 3)));
    CpuGemm gemm(GetParam(), team.pool);
    const Fp8Layer layer(random, Draw(random, 1, draw % 5 == 0 ? 1500 : 300), draw % 3 == 0 ? 900 : 90);
    const auto weight = NarrowMatrix::Pack(layer.rows, layer.in_features, GetParam(), team.pool);
    const auto reference_weight = reference.device().PackWeight(layer.rows, layer.in_features);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ((*weight)->out_features(), layer.out_features);
    for (int call = 0; call < 2; ++call) {
      const int64_t tokens = draw % 4 == 0 ? call : Draw(random, 0, 150);
      ExpectAgrees(gemm, **weight, reference, **reference_weight, tokens, 2 * Tolerance(layer.in_features),
                   random);
      if (HasFatalFailure()) return;
    }
  }
}

// A weight that is no number shows in its row's products, and in no other.
TEST_P(GemmTest, Fp8NaNShowsInItsRow) {
  constexpr int64_t kIn = 8, kOut = 70;
  PackTeam team(1);
  CpuGemm gemm(GetParam(), team.pool);
  std::vector<uint8_t> elements(kIn * kOut, 0x38);  // 1
  elements[5 * kIn + 3] = 0x7f;
  elements[66 * kIn + 1] = 0xff;
  const std::vector<float> scales(kOut, 0.5f);
  const WeightRows rows{.data = elements.data(),
                        .dtype = DType::kF8E4M3,
                        .rows = kOut,
                        .scales = scales.data(),
                        .scale_rows = 1,
                        .scale_columns = kIn};
  const auto weight = NarrowMatrix::Pack({&rows, 1}, kIn, GetParam(), team.pool);
  ASSERT_TRUE(weight.ok()) << weight.status();
  Tensor x(GetParam(), 3 * kIn);
  for (int64_t i = 0; i < x.count(); ++i) x.Set(i, 1);
  std::vector<float> y(3 * kOut);
  ASSERT_TRUE(
      gemm.Run({.weight = weight->get(), .x = x.data(), .tokens = 3, .y = y.data(), .y_dtype = DType::kF32},
               nullptr)
          .ok());
  for (int64_t i = 0; i < std::ssize(y); ++i) {
    const bool has_nan = i % kOut == 5 || i % kOut == 66;
    EXPECT_EQ(std::isnan(y[i]), has_nan) << i;
    EXPECT_TRUE(has_nan || y[i] == kIn * 0.5f) << i;
  }
}

// What is widened gives the bits of the same values held wide.
TEST_P(GemmTest, Fp8GivesTheBitsOfItsValuesInTheComputeDtype) {
  if (!OneDnnSumsRowsAlike(GetParam())) GTEST_SKIP() << "only AVX-512 promises this";
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 5; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    PackTeam team(2);
    CpuGemm gemm(GetParam(), team.pool);
    const Fp8Layer layer(random, Draw(random, 1, 1100), 600);
    const auto weight = NarrowMatrix::Pack(layer.rows, layer.in_features, GetParam(), team.pool);
    const auto wide = PackMatrix(layer.dequantised_rows, layer.in_features, GetParam(), team);
    ASSERT_TRUE(weight.ok() && wide.ok());
    for (const int64_t tokens : {int64_t{1}, Draw(random, 2, 200)}) {
      const Tensor x = Tensor::Normal(random, GetParam(), tokens * layer.in_features);
      Tensor y(GetParam(), tokens * layer.out_features), expected = y;
      GemmArgs args{
          .weight = weight->get(), .x = x.data(), .tokens = tokens, .y = y.data(), .y_dtype = GetParam()};
      ASSERT_TRUE(gemm.Run(args, nullptr).ok());
      args.weight = wide->get();
      args.y = expected.data();
      ASSERT_TRUE(gemm.Run(args, nullptr).ok());
      EXPECT_TRUE(y.SameBits(expected))
          << tokens << " tokens, " << layer.in_features << " to " << layer.out_features;
    }
  }
}

TEST(Mxfp4, EveryValueIsWhatItsBitsSay) {
  for (int bits = 0; bits < 16; ++bits) {
    const int exponent = bits >> 1 & 3, mantissa = bits & 1;
    const double magnitude = exponent == 0 ? mantissa * 0.5 : std::ldexp(1 + mantissa * 0.5, exponent - 1);
    EXPECT_EQ(Fp4ToFloat(static_cast<uint8_t>(bits)), bits >= 8 ? -magnitude : magnitude) << bits;
  }
  for (int bits = 0; bits < 255; ++bits) {
    EXPECT_EQ(E8M0ToFloat(static_cast<uint8_t>(bits)), std::ldexp(1.0, bits - 127)) << bits;
  }
  EXPECT_TRUE(std::isnan(E8M0ToFloat(255)));
}

TEST_P(GemmTest, Mxfp4AgreesWithTheReferenceAndWithItsValuesHeldWide) {
  const LoneStream reference = ReferenceStream(GetParam());
  const bool same_bits = OneDnnSumsRowsAlike(GetParam());
  const uint64_t seed = TestSeed();
  for (int draw = 0; draw < 15; ++draw) {
    SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
    std::mt19937_64 random(seed + draw);
    PackTeam team(static_cast<int>(Draw(random, 1, 3)));
    CpuGemm gemm(GetParam(), team.pool);
    const Fp4Layer layer(random, Draw(random, 1, draw % 5 == 0 ? 50 : 9), draw % 3 == 0 ? 700 : 90);
    const auto weight = NarrowMatrix::Pack(layer.rows, layer.in_features, GetParam(), team.pool);
    const auto wide = PackMatrix(layer.dequantised_rows, layer.in_features, GetParam(), team);
    const auto reference_weight = reference.device().PackWeight(layer.rows, layer.in_features);
    ASSERT_TRUE(weight.ok() && wide.ok() && reference_weight.ok()) << weight.status();
    const int64_t tokens = Draw(random, 0, 150);
    ExpectAgrees(gemm, **weight, reference, **reference_weight, tokens, 2 * Tolerance(layer.in_features),
                 random);
    if (HasFatalFailure()) return;
    if (!same_bits) continue;  // only AVX-512 promises this
    const Tensor x = Tensor::Normal(random, GetParam(), tokens * layer.in_features);
    Tensor y(GetParam(), tokens * layer.out_features), expected = y;
    GemmArgs args{
        .weight = weight->get(), .x = x.data(), .tokens = tokens, .y = y.data(), .y_dtype = GetParam()};
    ASSERT_TRUE(gemm.Run(args, nullptr).ok());
    args.weight = wide->get();
    args.y = expected.data();
    ASSERT_TRUE(gemm.Run(args, nullptr).ok());
    EXPECT_TRUE(y.SameBits(expected));
  }
}

// So many input features that one panel fills what is widened at a time. oneDNN may sum them in another order
// than those of the whole matrix.
TEST_P(GemmTest, Fp8IsWidenedStripByStrip) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  std::mt19937_64 random(seed);
  PackTeam team(2);
  CpuGemm gemm(GetParam(), team.pool);
  const int64_t in_features = 17000, columns = 2 * kPanelFeatures + 70;
  std::vector<uint8_t> elements(in_features * columns);
  for (uint8_t& element : elements) element = static_cast<uint8_t>(random()) & 0xb7;  // up to 1.875
  const std::vector<float> scales(columns, 0.5f);
  const WeightRows rows{.data = elements.data(),
                        .dtype = DType::kF8E4M3,
                        .rows = columns,
                        .scales = scales.data(),
                        .scale_rows = 1,
                        .scale_columns = in_features};
  const auto weight = NarrowMatrix::Pack({&rows, 1}, in_features, GetParam(), team.pool);
  ASSERT_TRUE(weight.ok());
  for (const int64_t tokens : {1, 3}) {
    const Tensor x = Tensor::Normal(random, GetParam(), tokens * in_features);
    std::vector<float> y(tokens * columns, NAN);
    ASSERT_TRUE(gemm.Run({.weight = weight->get(),
                          .x = x.data(),
                          .tokens = tokens,
                          .y = y.data(),
                          .y_dtype = DType::kF32},
                         nullptr)
                    .ok());
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t column = 0; column < columns; column += 37) {
        double expected = 0;
        for (int64_t in = 0; in < in_features; ++in) {
          expected +=
              double{x.At(token * in_features + in)} * 0.5 * Fp8ToFloat(elements[column * in_features + in]);
        }
        ASSERT_NEAR(y[token * columns + column], expected, 0.01) << "token " << token << ", " << column;
      }
    }
  }
}

TEST_P(GemmTest, Fp8RowsThatAreReadGiveTheSameBitsAndMayFail) {
  std::mt19937_64 random(1);
  PackTeam team(2);
  CpuGemm gemm(GetParam(), team.pool);
  const Fp8Layer layer(random, 77, 300);
  std::vector<FileRows> sources;
  for (const Tensor& tensor : layer.elements) sources.emplace_back(tensor, layer.in_features);
  std::vector<WeightRows> read = layer.rows;
  for (size_t i = 0; i < read.size(); ++i) {
    read[i].data = nullptr;
    read[i].source = &sources[i];
  }
  const auto mapped = NarrowMatrix::Pack(layer.rows, layer.in_features, GetParam(), team.pool);
  const auto from_file = NarrowMatrix::Pack(read, layer.in_features, GetParam(), team.pool);
  ASSERT_TRUE(mapped.ok() && from_file.ok());
  const Tensor x = Tensor::Normal(random, GetParam(), 5 * layer.in_features);
  Tensor y(DType::kF32, 5 * layer.out_features), expected = y;
  GemmArgs args{
      .weight = from_file->get(), .x = x.data(), .tokens = 5, .y = y.data(), .y_dtype = DType::kF32};
  ASSERT_TRUE(gemm.Run(args, nullptr).ok());
  args.weight = mapped->get();
  args.y = expected.data();
  ASSERT_TRUE(gemm.Run(args, nullptr).ok());
  EXPECT_TRUE(y.SameBits(expected));

  sources.back().fails_at = read.back().rows - 1;
  EXPECT_TRUE(absl::IsDataLoss(NarrowMatrix::Pack(read, layer.in_features, GetParam(), team.pool).status()));
}

// Promised for AVX-512: whatever the tile that a row falls into, and however many threads share the tiles.
TEST_P(GemmTest, ARowsBitsDependOnTheRowAlone) {
  if (!OneDnnSumsRowsAlike(GetParam())) GTEST_SKIP() << "only AVX-512 promises this";
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  std::mt19937_64 random(seed);
  // Few columns, too: what multiplies many tokens with them may not be what multiplies one.
  const int64_t in_features = Draw(random, 0, 1) == 0 ? 64 * Draw(random, 1, 40) : Draw(random, 1, 1300);
  const Layer layer(random, in_features, Draw(random, 0, 2) == 0 ? 40 : 700);
  const int64_t tokens = 655;
  const Tensor x = Tensor::Normal(random, GetParam(), tokens * layer.in_features);
  const auto run = [&](int threads, int64_t first, int64_t count) {
    PackTeam team(threads);
    CpuGemm gemm(GetParam(), team.pool);
    const auto weight = PackMatrix(layer.rows, layer.in_features, GetParam(), team);
    Tensor y(DType::kF32, count * layer.out_features);
    EXPECT_TRUE(gemm.Run({.weight = weight->get(),
                          .x = x.data<std::byte>() + first * layer.in_features * DTypeBytes(GetParam()),
                          .tokens = count,
                          .y = y.data(),
                          .y_dtype = DType::kF32},
                         nullptr)
                    .ok());
    return y;
  };
  const Tensor whole = run(1, 0, tokens);
  for (const auto& [threads, first, count] : {std::tuple<int, int64_t, int64_t>{2, 0, tokens},
                                              {3, 0, tokens},
                                              {7, 0, tokens},
                                              {1, 17, 1},
                                              {3, 18, 1},
                                              {2, 100, 77},
                                              {5, 200, 30},
                                              {1, 300, 2},
                                              {2, 250, 5},
                                              {1, 120, Draw(random, 3, 130)}}) {
    const Tensor part = run(threads, first, count);
    const size_t row_bytes = layer.out_features * sizeof(float);
    EXPECT_EQ(std::memcmp(part.data(), whole.data<std::byte>() + first * row_bytes, count * row_bytes), 0)
        << count << " tokens from " << first << " on " << threads << " threads";
  }
}

TEST_P(GemmTest, TheSourcesMayGoAfterPacking) {
  std::mt19937_64 random(1);
  PackTeam team(1);
  CpuGemm gemm(GetParam(), team.pool);
  std::vector<float> weights(8 * 4, 1.0f), bias(8, 0.5f);
  const WeightRows rows{.data = weights.data(), .dtype = DType::kF32, .rows = 8, .bias = bias.data()};
  const auto weight = PackMatrix({&rows, 1}, 4, GetParam(), team);
  std::fill(weights.begin(), weights.end(), 100.0f);
  std::fill(bias.begin(), bias.end(), 100.0f);
  Tensor x(GetParam(), 4), y(DType::kF32, 8);
  for (int i = 0; i < 4; ++i) x.Set(i, 2);
  ASSERT_TRUE(
      gemm.Run({.weight = weight->get(), .x = x.data(), .tokens = 1, .y = y.data(), .y_dtype = DType::kF32},
               nullptr)
          .ok());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(y.At(i), 8.5f);
}

int64_t ResidentBytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * 4096;
}

// What packing needs meanwhile goes, also in front of what stays.
TEST_P(GemmTest, PackingLeavesNoHolesInTheHeap) {
  PackTeam team(1);
  constexpr int64_t kIn = 2048, kOut = 1536, kWeights = 24;
  const Tensor values(DType::kBf16, kIn * kOut);
  const WeightRows rows{.data = values.data(), .dtype = DType::kBf16, .rows = kOut};
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  const int64_t before = ResidentBytes();
  int64_t bytes = 0;
  for (int i = 0; i < kWeights; ++i) {
    auto weight = PackMatrix({&rows, 1}, kIn, GetParam(), team);
    ASSERT_TRUE(weight.ok()) << weight.status();
    weights.push_back(*std::move(weight));
    bytes += PackedFormOf(kIn, kOut, GetParam())->bytes;
  }
  EXPECT_LT(ResidentBytes() - before, bytes + bytes / 8);
}

// Ranks of one process share their weights, and multiply at the same time.
TEST_P(GemmTest, OneWeightServesSeveralRanks) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  std::mt19937_64 random(seed);
  PackTeam team(2);
  CpuGemm gemm(GetParam(), team.pool);
  const Layer layer(random, 65, 200);
  const auto weight = PackMatrix(layer.rows, layer.in_features, GetParam(), team);
  ASSERT_TRUE(weight.ok()) << weight.status();
  const Tensor x = Tensor::Normal(random, GetParam(), 100 * layer.in_features);
  const auto run = [&](CpuGemm& mine) {
    Tensor y(GetParam(), 100 * layer.out_features);
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(mine.Run({.weight = weight->get(),
                            .x = x.data(),
                            .tokens = 100,
                            .y = y.data(),
                            .y_dtype = GetParam()},
                           nullptr)
                      .ok());
    }
    return y;
  };
  Tensor other_y(GetParam(), 0);
  std::thread other([&] {
    ThreadPool other_pool(2);
    CpuGemm other_gemm(GetParam(), other_pool);
    other_y = run(other_gemm);
  });
  const Tensor y = run(gemm);
  other.join();
  EXPECT_TRUE(y.SameBits(other_y));
}

TEST_P(GemmTest, ARaisedStopTokenCancels) {
  PackTeam team(2);
  CpuGemm gemm(GetParam(), team.pool);
  const Tensor zeros(DType::kF32, 16);
  const WeightRows rows{.data = zeros.data(), .dtype = DType::kF32, .rows = 4};
  const auto weight = PackMatrix({&rows, 1}, 4, GetParam(), team);
  Tensor x(GetParam(), 8), y(DType::kF32, 8);
  StopToken stop;
  stop.Stop();
  const GemmArgs args{
      .weight = weight->get(), .x = x.data(), .tokens = 2, .y = y.data(), .y_dtype = DType::kF32};
  EXPECT_EQ(gemm.Run(args, &stop).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(gemm.Run(args, nullptr).ok());
}

}  // namespace
}  // namespace meshfill
