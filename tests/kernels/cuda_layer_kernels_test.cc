// The CUDA kernels of a layer's element-wise operations as they are, on an emulated CTA, against the
// reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/layer_kernels.cuh"
#include "kernels/cuda/layer_launch.h"
#include "tests/kernels/cuda_emulator.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_draws.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

using Kernels = LayerKernels<EmulatedMachine>;

class CudaLayerKernelsTest : public RandomDraws {
 protected:
  // Runs a kernel in a grid of a few CTAs, whatever it has to do.
  void Run(const std::function<void()>& kernel) {
    const auto blocks = static_cast<uint32_t>(Draw(1, 3));
    for (uint32_t block = 0; block < blocks; ++block) {
      EmulatedCta cta(kLayerThreads, block, blocks, 16, random_());
      ASSERT_EQ(cta.Run(kernel), "");
    }
  }

  // SwiGlu or GeGlu: eight elements at a time, and one at a time.
  using GatedKernel = void (*)(const BFloat16*, int64_t, int64_t, BFloat16*);
  void TestGated(GatedKernel vectors, GatedKernel elements, Gating gating) {
    ForRandomDraws(6, [&] {
      const bool fits = Draw(0, 1) == 1;
      const int64_t tokens = Draw(0, 8), width = fits ? 8 * Draw(1, 300) : Draw(1, 700);
      const Tensor x = Tensor::Normal(random_, DType::kBf16, tokens * 2 * width, 4);
      Tensor got(DType::kBf16, tokens * width), expected = got;
      const GatedKernel kernel = fits ? vectors : elements;
      Run([&] { kernel(x.data<BFloat16>(), tokens, width, got.data<BFloat16>()); });
      ASSERT_TRUE(reference_
                      ->Activate({.activation = {.gating = gating},
                                  .x = x.data(),
                                  .tokens = tokens,
                                  .width = width,
                                  .y = expected.data()})
                      .ok());
      ExpectClose(got, expected, 4e-6);
    });
  }

  const LoneStream reference_ = ReferenceStream(DType::kBf16);
};

TEST(FitsVectors, WantsAlignedPointersAndStrides) {
  alignas(32) const float at[8] = {};
  EXPECT_TRUE(FitsVectors(at, DType::kF32, 4, {4, 128}));
  EXPECT_FALSE(FitsVectors(at, DType::kF32, 4, {4, 130}));
  EXPECT_FALSE(FitsVectors(at + 1, DType::kF32, 4, {4}));
  EXPECT_TRUE(FitsVectors(at + 2, DType::kBf16, 4, {4}));
}

TEST(RowsFitDivisor, TakesRowsOf32Bits) {
  constexpr int64_t kLimit = int64_t{1} << 32;
  EXPECT_TRUE(RowsFitDivisor("copy heads", kLimit - 1).ok());
  EXPECT_EQ(RowsFitDivisor("copy heads", kLimit).message(),
            "copy heads: 4294967296 rows of heads; a launch takes fewer than 2^32, use more ranks");
}

TEST_F(CudaLayerKernelsTest, Embed) {
  ForRandomDraws(6, [&] {
    const int64_t vocab = Draw(1, 20), width = 4 * Draw(1, 90), tokens = Draw(0, 12);
    const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(0, 2)];
    const Tensor table = Tensor::Normal(random_, dtype, vocab * width);
    std::vector<uint32_t> ids(tokens);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(Draw(0, vocab - 1));
    Tensor got(DType::kF32, tokens * width), expected = got;
    Run([&] {
      if (dtype == DType::kF32)
        Kernels::Embed<4>(ids.data(), tokens, table.data<float>(), width, got.data<float>());
      if (dtype == DType::kBf16)
        Kernels::Embed<1>(ids.data(), tokens, table.data<BFloat16>(), width, got.data<float>());
      if (dtype == DType::kF16)
        Kernels::Embed<4>(ids.data(), tokens, table.data<Float16>(), width, got.data<float>());
    });
    ASSERT_TRUE(reference_->Embed(ids, table.data(), dtype, width, expected.data<float>()).ok());
    ExpectClose(got, expected, 0);
  });
}

TEST_F(CudaLayerKernelsTest, RmsNorm) {
  ForRandomDraws(6, [&] {
    const bool vectors = Draw(0, 1) == 1;
    const int64_t tokens = Draw(0, 30), width = vectors ? 4 * Draw(1, 120) : Draw(1, 500);
    const float scale = Draw(0, 1) == 1 ? 3 : 3e-3f;  // where eps counts
    const Tensor x = Tensor::Normal(random_, DType::kF32, tokens * width, scale);
    const Tensor weight = Tensor::Normal(random_, DType::kF32, width);
    Tensor got(DType::kBf16, tokens * width), expected = got;
    Run([&] {
      const auto kernel = vectors ? Kernels::RmsNorm<4> : Kernels::RmsNorm<1>;
      kernel(x.data<float>(), weight.data<float>(), tokens, width, 1e-5f, got.data<BFloat16>());
    });
    ASSERT_TRUE(
        reference_->RmsNorm(x.data<float>(), weight.data<float>(), tokens, width, 1e-5f, expected.data())
            .ok());
    ExpectClose(got, expected, 4e-6);
  });
}

TEST_F(CudaLayerKernelsTest, AddRmsNorm) {
  ForRandomDraws(6, [&] {
    const bool vectors = Draw(0, 1) == 1;
    const int64_t tokens = Draw(0, 30), width = vectors ? 4 * Draw(1, 120) : Draw(1, 500);
    const float scale = Draw(0, 1) == 1 ? 3 : 3e-3f;  // where eps counts
    const Tensor y = Tensor::Normal(random_, DType::kF32, tokens * width, scale);
    const Tensor weight = Tensor::Normal(random_, DType::kF32, width);
    Tensor got = Tensor::Normal(random_, DType::kF32, tokens * width), expected = got;
    Run([&] {
      const auto kernel = vectors ? Kernels::AddRmsNorm<4> : Kernels::AddRmsNorm<1>;
      kernel(y.data<float>(), weight.data<float>(), tokens, width, 1e-5f, got.data<float>());
    });
    ASSERT_TRUE(
        reference_
            ->AddRmsNorm(y.data<float>(), weight.data<float>(), tokens, width, 1e-5f, expected.data<float>())
            .ok());
    ExpectClose(got, expected, 1e-5);
  });
}

TEST_F(CudaLayerKernelsTest, Scale) {
  ForRandomDraws(4, [&] {
    const int64_t vectors = Draw(0, 2000);
    Tensor got = Tensor::Normal(random_, DType::kF32, 4 * vectors), expected = got;
    Run([&] { Kernels::Scale<4>(got.data<float>(), vectors, 7.25f); });
    ASSERT_TRUE(reference_->Scale(expected.data<float>(), 4 * vectors, 7.25f).ok());
    EXPECT_TRUE(got.SameBits(expected));
  });
}

TEST_F(CudaLayerKernelsTest, SplitQkv) {
  ForRandomDraws(8, [&] {
    const int q_heads = static_cast<int>(Draw(1, 5)), kv_heads = static_cast<int>(Draw(1, 3));
    const int head_dim = 4 * static_cast<int>(Draw(1, 64));
    const int half = 2 * static_cast<int>(Draw(0, 1) == 1 ? head_dim / 4 : Draw(1, head_dim / 4));
    const int64_t chunk_tokens = Draw(0, 20);
    const int64_t slot_begin = Draw(0, chunk_tokens), tokens = Draw(0, chunk_tokens - slot_begin);
    const float scale = Draw(0, 1) == 1 ? 1 : 1e-3f;  // where norm_eps counts
    const Tensor qkv =
        Tensor::Normal(random_, DType::kBf16, tokens * (q_heads + 2 * kv_heads) * head_dim, scale);
    const Tensor q_norm = Tensor::Normal(random_, DType::kF32, q_heads * head_dim);
    const Tensor k_norm = Tensor::Normal(random_, DType::kF32, kv_heads * head_dim);
    const Tensor cos = Tensor::Normal(random_, DType::kF32, chunk_tokens * half);
    const Tensor sin = Tensor::Normal(random_, DType::kF32, chunk_tokens * half);
    const bool norms = Draw(0, 1) == 1;
    // Zeros: what the slice does not write must stay.
    const auto zeros = [&](int64_t heads) {
      Tensor tensor(DType::kBf16, heads * chunk_tokens * head_dim);
      for (int64_t i = 0; i < tensor.count(); ++i) tensor.Set(i, 0);
      return tensor;
    };
    Tensor q = zeros(q_heads), k = zeros(kv_heads), v = zeros(kv_heads);
    Tensor expected_q = q, expected_k = k, expected_v = v;
    SplitQkvArgs args{.qkv = qkv.data(),
                      .tokens = tokens,
                      .slot_begin = slot_begin,
                      .chunk_tokens = chunk_tokens,
                      .q_heads = q_heads,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .rotated_dim = 2 * half,
                      .q_norm = norms ? q_norm.data<float>() : nullptr,
                      .k_norm = norms ? k_norm.data<float>() : nullptr,
                      .norm_all_heads = Draw(0, 1) == 1,
                      .norm_eps = 1e-6f,
                      .rope_cos = cos.data<float>(),
                      .rope_sin = sin.data<float>(),
                      .q = q.data(),
                      .k = k.data(),
                      .v = v.data()};
    Run([&] { Kernels::SplitQkv(args); });
    args.q = expected_q.data(), args.k = expected_k.data(), args.v = expected_v.data();
    ASSERT_TRUE(reference_->SplitQkv(args).ok());
    ExpectClose(q, expected_q, 2e-5);
    ExpectClose(k, expected_k, 2e-5);
    ExpectClose(v, expected_v, 0);
  });
}

TEST_F(CudaLayerKernelsTest, MergePartial) {
  constexpr float kNothingSeen = -std::numeric_limits<float>::infinity();
  ForRandomDraws(8, [&] {
    const bool vectors = Draw(0, 1) == 1;
    const int64_t rows = Draw(0, 60);
    const int head_dim = static_cast<int>(vectors ? 4 * Draw(1, 64) : Draw(1, 256));
    const DType other_dtype = Draw(0, 1) == 0 ? DType::kF32 : DType::kBf16;
    Tensor o = Tensor::Normal(random_, DType::kF32, rows * head_dim);
    Tensor lse = Tensor::Normal(random_, DType::kF32, rows, 20);
    Tensor other_o = Tensor::Normal(random_, other_dtype, rows * head_dim);
    Tensor other_lse = Tensor::Normal(random_, DType::kF32, rows, 20);
    for (int64_t row = 0; row < rows; ++row) {
      for (auto [state_o, state_lse] : {std::pair(&o, &lse), {&other_o, &other_lse}}) {
        if (Draw(0, 3) != 0) continue;
        state_lse->Set(row, kNothingSeen);
        for (int i = 0; i < head_dim; ++i) state_o->Set(row * head_dim + i, 0);
      }
    }
    Tensor expected_o = o, expected_lse = lse;
    MergePartialArgs args{.o = o.data<float>(),
                          .lse = lse.data<float>(),
                          .other_o = other_o.data(),
                          .other_dtype = other_dtype,
                          .other_lse = other_lse.data<float>(),
                          .rows = rows,
                          .head_dim = head_dim};
    Run([&] {
      if (other_dtype == DType::kF32) {
        vectors ? Kernels::MergePartial<4, float>(args) : Kernels::MergePartial<1, float>(args);
      } else {
        vectors ? Kernels::MergePartial<4, BFloat16>(args) : Kernels::MergePartial<1, BFloat16>(args);
      }
    });
    args.o = expected_o.data<float>(), args.lse = expected_lse.data<float>();
    ASSERT_TRUE(reference_->MergePartial(args).ok());
    ExpectClose(o, expected_o, 1e-5);
    ExpectClose(lse, expected_lse, 1e-6);
  });
}

// Some rows have seen no key.
TEST_F(CudaLayerKernelsTest, ApplySinks) {
  ForRandomDraws(8, [&] {
    const bool vectors = Draw(0, 1) == 1;
    const int heads = static_cast<int>(Draw(1, 6));
    const int64_t tokens = Draw(0, 30);
    const int head_dim = static_cast<int>(vectors ? 4 * Draw(1, 64) : Draw(1, 256));
    Tensor got = Tensor::Normal(random_, DType::kF32, heads * tokens * head_dim), expected = got;
    Tensor lse = Tensor::Normal(random_, DType::kF32, heads * tokens, 20);
    for (int64_t row = 0; row < lse.count(); ++row) {
      if (Draw(0, 5) == 0) lse.Set(row, -std::numeric_limits<float>::infinity());
    }
    const Tensor sinks = Tensor::Normal(random_, DType::kF32, heads, 20);
    ApplySinksArgs args{.o = got.data<float>(),
                        .lse = lse.data<float>(),
                        .sinks = sinks.data<float>(),
                        .heads = heads,
                        .tokens = tokens,
                        .head_dim = head_dim};
    const Divisor divisor(static_cast<uint32_t>(std::max<int64_t>(tokens, 1)));
    Run([&] { vectors ? Kernels::ApplySinks<4>(args, divisor) : Kernels::ApplySinks<1>(args, divisor); });
    args.o = expected.data<float>();
    ASSERT_TRUE(reference_->ApplySinks(args).ok());
    ExpectClose(got, expected, 1e-5);
  });
}

TEST_F(CudaLayerKernelsTest, CopyHeads) {
  ForRandomDraws(10, [&] {
    const int heads = static_cast<int>(Draw(1, 5)), head_dim = 4 * static_cast<int>(Draw(1, 40));
    const int64_t tokens = Draw(0, 30);
    const SlotPositions slots = {.base = Draw(0, 3), .stride = Draw(1, 3), .width = Draw(1, 9)};
    const int64_t all_slots = tokens == 0 ? 0 : slots.At(tokens - 1) + 1;
    const Tensor from = Tensor::Normal(random_, DType::kF32, heads * tokens * head_dim);
    Tensor got(DType::kBf16, heads * all_slots * head_dim), expected = got;
    CopyHeadsArgs args{
        .from = from.data(),
        .from_rows = {.dtype = DType::kF32, .head_stride = tokens * head_dim, .slot_stride = head_dim},
        .to = got.data(),
        .to_rows = {.dtype = DType::kBf16,
                    .head_stride = head_dim,
                    .slot_stride = int64_t{heads} * head_dim,
                    .slots = slots},
        .heads = heads,
        .tokens = tokens,
        .head_dim = head_dim};
    const Kernels::CopyHeadsDivisors divisors(args);
    Run([&] { Kernels::CopyHeads<4, float, BFloat16>(args, divisors); });
    args.to = expected.data();
    ASSERT_TRUE(reference_->CopyHeads(args).ok());
    EXPECT_TRUE(got.SameBits(expected));
  });
}

TEST_F(CudaLayerKernelsTest, SwiGlu) { TestGated(Kernels::SwiGlu<8>, Kernels::SwiGlu<1>, Gating::kSwiGlu); }

TEST_F(CudaLayerKernelsTest, GeGlu) { TestGated(Kernels::GeGlu<8>, Kernels::GeGlu<1>, Gating::kGeGlu); }

TEST_F(CudaLayerKernelsTest, ClampedSwiGlu) {
  ForRandomDraws(6, [&] {
    const bool vectors = Draw(0, 1) == 1;
    const int64_t tokens = Draw(0, 8), width = vectors ? 4 * Draw(1, 300) : Draw(1, 700);
    const Tensor x = Tensor::Normal(random_, DType::kBf16, tokens * 2 * width, 6);
    Tensor got(DType::kBf16, tokens * width), expected = got;
    ActivateArgs args{.activation = {.gating = Gating::kClampedSwiGlu, .alpha = 1.702f, .limit = 7},
                      .x = x.data(),
                      .tokens = tokens,
                      .width = width,
                      .y = got.data()};
    Run([&] {
      vectors ? Kernels::ClampedSwiGlu<4>(args, tokens * width / 4)
              : Kernels::ClampedSwiGlu<1>(args, tokens * width);
    });
    args.y = expected.data();
    ASSERT_TRUE(reference_->Activate(args).ok());
    ExpectClose(got, expected, 4e-6);
  });
}

TEST_F(CudaLayerKernelsTest, Convert) {
  ForRandomDraws(6, [&] {
    const int64_t vectors = Draw(0, 3000);
    const Tensor from = Tensor::Normal(random_, DType::kF32, 4 * vectors);
    Tensor got(DType::kBf16, 4 * vectors), expected = got;
    Run([&] { Kernels::Convert<4>(from.data<float>(), vectors, got.data<BFloat16>()); });
    ASSERT_TRUE(reference_->Convert(from.data<float>(), 4 * vectors, DType::kBf16, expected.data()).ok());
    EXPECT_TRUE(got.SameBits(expected));
  });
}

// Matrices of both kinds side by side, eight elements at a time and one.
TEST_F(CudaLayerKernelsTest, Widen) {
  ForRandomDraws(10, [&] {
    const bool fits = Draw(0, 1) == 1, fp4 = Draw(0, 1) == 1;
    const auto width = static_cast<uint32_t>(fp4    ? kMxBlock * Draw(1, 20)
                                             : fits ? 8 * Draw(1, 80)
                                                    : Draw(1, 600));
    const auto rows = static_cast<uint32_t>(Draw(1, 9)), count = static_cast<uint32_t>(Draw(1, 4));
    Tensor got(DType::kBf16, int64_t{count} * rows * width), expected = got;
    std::vector<NarrowMatrix> matrices;
    std::vector<std::vector<uint8_t>> all_rows;
    for (uint32_t m = 0; m < count; ++m) {
      const bool has_fp4 = fp4 && Draw(0, 1) == 1;
      const auto columns = static_cast<uint32_t>(has_fp4 ? kMxBlock
                                                 : fits  ? 8 * Draw(1, 20)
                                                         : Draw(1, width));
      const uint32_t scales_of_row = (width + columns - 1) / columns;
      const uint32_t element_bytes = has_fp4 ? width / 2 : width;
      const uint32_t scales_at =
          (element_bytes + 3) / 4 * 4 + 4 * static_cast<uint32_t>(Draw(0, 2));  // some gap
      const uint32_t row_bytes = scales_at + 4 * (scales_of_row + static_cast<uint32_t>(Draw(0, 2)));
      std::vector<uint8_t>& bytes = all_rows.emplace_back(rows * row_bytes);
      const Tensor scales = Tensor::Normal(random_, DType::kF32, rows * scales_of_row);
      for (uint32_t row = 0; row < rows; ++row) {
        uint8_t* const elements = bytes.data() + row * row_bytes;
        for (uint32_t i = 0; i < element_bytes; ++i) {
          do elements[i] = static_cast<uint8_t>(Draw(0, 255));
          while (!has_fp4 && (elements[i] & 0x7f) == 0x7f);  // NaN
        }
        for (uint32_t scale = 0; scale < scales_of_row; ++scale) {
          const float factor = scales.At(row * scales_of_row + scale);
          if (has_fp4) {
            elements[scales_at + scale] = static_cast<uint8_t>(Draw(0, 254));
          } else {
            std::memcpy(elements + scales_at + scale * sizeof(float), &factor, sizeof(float));
          }
        }
        for (uint32_t i = 0; i < width; ++i) {
          const uint32_t scale = i / columns;
          const float value = has_fp4 ? Fp4ToFloat(static_cast<uint8_t>(elements[i / 2] >> i % 2 * 4)) *
                                            std::ldexp(1.0f, elements[scales_at + scale] - 127)
                                      : Fp8ToFloat(elements[i]) * scales.At(row * scales_of_row + scale);
          expected.Set((int64_t{m} * rows + row) * width + i, value);
        }
      }
      matrices.push_back({.rows = bytes.data(),
                          .row_bytes = row_bytes,
                          .scales_at = scales_at,
                          .scale_columns = Divisor(columns),
                          .fp4 = has_fp4});
    }
    auto* const to = got.data<BFloat16>();
    const auto kernel = WidensVectors(matrices, width, to) ? Kernels::Widen<8> : Kernels::Widen<1>;
    Run([&] { kernel(matrices.data(), count * rows, Divisor(rows), width, to); });
    EXPECT_TRUE(got.SameBits(expected));
  });
}

TEST(WidensVectors, WantsAlignmentAndOneScaleForEight) {
  alignas(16) uint8_t bytes[64] = {};
  BFloat16* const to = reinterpret_cast<BFloat16*>(bytes);
  const auto widens = [&](int64_t offset, uint32_t scale_columns, int64_t width, bool fp4 = false,
                          uint32_t row_bytes = 16) {
    const NarrowMatrix matrix = {bytes + offset, row_bytes, 0, Divisor(scale_columns), fp4};
    return WidensVectors({&matrix, 1}, width, to);
  };
  EXPECT_TRUE(widens(8, 128, 256));
  EXPECT_TRUE(widens(8, 20, 16));  // one scale
  EXPECT_FALSE(widens(8, 20, 32));
  EXPECT_FALSE(widens(4, 128, 256));
  EXPECT_TRUE(widens(4, 32, 256, /*fp4=*/true));
  EXPECT_FALSE(widens(8, 128, 252));
  EXPECT_FALSE(widens(8, 128, 256, /*fp4=*/false, /*row_bytes=*/12));
  EXPECT_TRUE(widens(8, 32, 256, /*fp4=*/true, /*row_bytes=*/12));
}

}  // namespace
}  // namespace meshfill
