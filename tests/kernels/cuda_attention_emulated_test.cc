// The CUDA attention kernels as they are, on an emulated chip.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_params.h"
#include "kernels/cuda/attention_sm80.cuh"
#include "kernels/cuda/attention_sm90.cuh"
#include "tests/kernels/cuda_attention_case.h"
#include "tests/kernels/cuda_emulator.h"

namespace meshfill {
namespace {

constexpr int64_t kL2Bytes = 100'000;  // small: several sections of heads

template <class T, int kDim>
std::string RunSm80(const AttentionParams& params, uint64_t seed) {
  using Kernel = Sm80Attention<EmulatedMachine, T, kDim>;
  using Config = typename Kernel::Config;
  const QueryTiles<Config::kRows> tiles(params.shape);
  const uint32_t blocks = tiles.count();
  for (uint32_t block = 0; block < blocks; ++block) {
    EmulatedCta cta(Config::kThreads, block, blocks, Config::kSharedBytes, seed + block);
    if (std::string error = cta.Run([&] { Kernel::Run(params, tiles, EmulatedCta::kSharedBase); });
        !error.empty()) {
      return error;
    }
  }
  return "";
}

template <class T, int kDim>
std::string RunSm90(const AttentionParams& params, uint64_t seed) {
  using Kernel = Sm90Attention<EmulatedMachine, T, kDim>;
  using Config = typename Kernel::Config;
  const BlockShape& shape = params.shape;
  const uint32_t kv_heads = shape.kv_heads();
  const auto map = [&](const void* tensor, uint32_t heads, uint32_t tokens, uint32_t rows) {
    return EmulatedMap{
        static_cast<const uint16_t*>(tensor), heads, tokens, shape.head_dim, rows, Config::kColumnsOfSlab};
  };
  const EmulatedMap q = map(params.q, shape.q_heads, shape.q_tokens, Config::kRows);
  const EmulatedMap k = map(params.k, kv_heads, shape.k_tokens, Config::kKeys);
  const EmulatedMap v = map(params.v, kv_heads, shape.k_tokens, Config::kKeys);
  const QueryTiles<Config::kRows> tiles(shape);
  const uint32_t blocks = std::min<uint32_t>(tiles.count(), 1 + seed % 3);
  for (uint32_t block = 0; block < blocks; ++block) {
    EmulatedCta cta(Config::kThreads, block, blocks, Config::kSharedBytes, seed + block);
    const std::string error = cta.Run([&] {
      Kernel::Run(params, tiles, {&q, &k, &v}, EmulatedCta::kSharedBase);
    });
    if (!error.empty()) return error;
  }
  return "";
}

template <class T>
std::string RunEmulated(bool sm90, const AttentionParams& params, uint64_t seed) {
  const uint32_t head_dim = params.shape.head_dim;
  if (sm90) {
    if (head_dim <= 64) return RunSm90<T, 64>(params, seed);
    if (head_dim <= 96) return RunSm90<T, 96>(params, seed);
    if (head_dim <= 128) return RunSm90<T, 128>(params, seed);
    return RunSm90<T, 256>(params, seed);
  }
  if (head_dim <= 64) return RunSm80<T, 64>(params, seed);
  if (head_dim <= 96) return RunSm80<T, 96>(params, seed);
  if (head_dim <= 128) return RunSm80<T, 128>(params, seed);
  return RunSm80<T, 256>(params, seed);
}

class CudaAttentionEmulatedTest : public testing::TestWithParam<bool> {
 protected:
  bool sm90() const { return GetParam(); }

  void Run(const AttentionCase& shape, AttentionData& data) {
    const AttentionParams params = MakeAttentionParams(data.Args(shape), kL2Bytes);
    const std::string error = shape.dtype == DType::kBf16 ? RunEmulated<BFloat16>(sm90(), params, random_())
                                                          : RunEmulated<Half>(sm90(), params, random_());
    ASSERT_EQ(error, "");
  }
  void ExpectMatches(
      const AttentionCase& shape, absl::FunctionRef<void(AttentionData&)> change = [](AttentionData&) {}) {
    SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_, ": ", shape.DebugString()));
    AttentionData before(shape, random_);
    change(before);
    AttentionData after = before;
    ASSERT_NO_FATAL_FAILURE(Run(shape, after));
    ExpectReferenceState(shape, before, after);
  }

  const uint32_t seed_ = TestSeed();
  std::mt19937 random_{seed_};
};

TEST_P(CudaAttentionEmulatedTest, EveryHeadDimMatchesTheReference) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const DType dtype : {DType::kBf16, DType::kF16}) {
      ExpectMatches({.dtype = dtype, .head_dim = head_dim, .group = 2, .q_tokens = 130, .k_tokens = 270});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaAttentionEmulatedTest, RandomBlocksMatchTheReference) {
  for (int draw = 0; draw < 12; ++draw) {
    ExpectMatches(RandomAttentionCase(random_, {8, 40, 64, 72, 88, 96, 128, 136}, 400));
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaAttentionEmulatedTest, ManyKeyTilesPassThroughTheRing) {
  for (const int head_dim : {64, 96, 128, 128, 256}) {
    AttentionCase shape{.head_dim = head_dim, .q_tokens = 128, .k_tokens = 900};
    shape.band.q.base = 800;
    ExpectMatches(shape);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaAttentionEmulatedTest, WindowsAreMaskedAtBothEnds) {
  for (const int head_dim : {64, 96, 128, 256}) {
    ExpectMatches(MaskedAtBothEnds(random_, head_dim));
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaAttentionEmulatedTest, ScoresThatGrowAlongTheRow) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const bool towards_the_end : {false, true}) {
      AttentionCase shape{.head_dim = head_dim, .q_tokens = 64, .k_tokens = 500};
      shape.band.q.base = 500;
      ExpectMatches(shape, [&](AttentionData& data) { GrowScores(shape, towards_the_end, data); });
      if (HasFatalFailure()) return;
    }
  }
}

// What a row's sum is multiplied by at each key tile must be exactly 1 while its maximum stays: rounded to
// the ulp of the maximum, it is off by 2e-5 to 2e-4 after as many tiles. Peaked scores, whose maxima are
// large.
TEST_P(CudaAttentionEmulatedTest, LongRowsDoNotDrift) {
  AttentionCase shape{.head_dim = 64, .q_tokens = 8, .k_tokens = 12'288};
  shape.band.q.base = shape.k_tokens;
  SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_));
  AttentionData data(shape, random_);
  for (uint16_t& q : data.q) q = BFloat16::FromFloat(3.5f * BFloat16{q}.ToFloat()).bits;
  ASSERT_NO_FATAL_FAILURE(Run(shape, data));
  const double scale = data.Args(shape).scale;
  for (int64_t row = 0; row < shape.q_tokens; ++row) {
    std::vector<double> scores(shape.k_tokens, 0);
    for (int64_t key = 0; key < shape.k_tokens; ++key) {
      for (int i = 0; i < 64; ++i) {
        scores[key] +=
            scale * BFloat16{data.q[row * 64 + i]}.ToFloat() * BFloat16{data.k[key * 64 + i]}.ToFloat();
      }
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - max);
    EXPECT_NEAR(data.lse[row], max + std::log(sum), 2e-5) << "row " << row;
  }
}

// A row that sees no key keeps its bits, and a row that carries nothing becomes empty.
TEST_P(CudaAttentionEmulatedTest, RowsThatSeeNothing) {
  AttentionCase shape{.head_dim = 64, .kv_heads = 2, .q_tokens = 200, .k_tokens = 70};
  shape.band.k.base = 190;  // queries 0 to 189 see no key
  for (const bool carry_in : {false, true}) {
    shape.carry_in = carry_in;
    const AttentionData before(shape, random_);
    AttentionData after = before;
    ASSERT_NO_FATAL_FAILURE(Run(shape, after));
    ExpectReferenceState(shape, before, after);
    for (int64_t row = 0; carry_in && row < shape.rows(); ++row) {
      if (row % shape.q_tokens >= 190) continue;
      ASSERT_EQ(std::memcmp(&after.lse[row], &before.lse[row], 4), 0);
      ASSERT_EQ(std::memcmp(&after.o[row * 64], &before.o[row * 64], 64 * 4), 0);
    }
  }
}

// A NaN must reach the logits, where the server looks for it, and no row that does not see its tile.
TEST_P(CudaAttentionEmulatedTest, NaNSpreadsToTheRowsThatSeeIt) {
  const AttentionCase shape{.head_dim = 64, .q_tokens = 300, .k_tokens = 300};
  AttentionData data(shape, random_);
  data.k[200 * 64 + 7] = 0x7fc0;
  ASSERT_NO_FATAL_FAILURE(Run(shape, data));
  for (int64_t row = 0; row < 300; ++row) {
    EXPECT_EQ(std::isnan(data.lse[row]), row >= 200) << row;
    EXPECT_EQ(std::isnan(data.o[row * 64]), row >= 200) << row;
  }
}

// The order of threads, copies and products is random: the bits must not be.
TEST_P(CudaAttentionEmulatedTest, SameBitsUnderEverySchedule) {
  AttentionCase shape{.head_dim = 64, .q_tokens = 150, .k_tokens = 300};
  shape.band.q.base = 150;
  const AttentionData before(shape, random_);
  AttentionData first = before, second = before;
  ASSERT_NO_FATAL_FAILURE(Run(shape, first));
  ASSERT_NO_FATAL_FAILURE(Run(shape, second));
  EXPECT_EQ(std::memcmp(first.o.data(), second.o.data(), first.o.size() * 4), 0);
  EXPECT_EQ(std::memcmp(first.lse.data(), second.lse.data(), first.lse.size() * 4), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaAttentionEmulatedTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "sm90" : "sm80"; });

}  // namespace
}  // namespace meshfill
