// The CUDA attention kernels on a device. Without one the program ends with status 77: not run.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_bench.h"
#include "kernels/cuda/device_traits.h"
#include "tests/kernels/cuda_attention_case.h"

namespace meshfill {
namespace {

// A vector's copy on the device.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : bytes_(host.size() * sizeof(T)) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_ + 16), cudaSuccess);  // never empty
    EXPECT_EQ(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }
  T* data() { return static_cast<T*>(data_); }
  void CopyTo(std::vector<T>& host) const {
    EXPECT_EQ(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

class CudaAttentionTest : public testing::TestWithParam<CudaAttentionKernel> {
 protected:
  void SetUp() override {
    const absl::StatusOr<CudaDeviceTraits> device = ReadCudaDeviceTraits(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *device;
  }

  // Replaces o and lse by what the kernel makes of them.
  void Run(const AttentionCase& shape, AttentionData& data, CudaAttentionKernel kernel) {
    OnDevice<uint16_t> q(data.q), k(data.k), v(data.v);
    OnDevice<float> o(data.o), lse(data.lse);
    AttentionBlockArgs args = data.Args(shape);
    args.q = q.data(), args.k = k.data(), args.v = v.data(), args.o = o.data(), args.lse = lse.data();
    const absl::Status status = CudaAttentionBlock(args, shape.dtype, device_, nullptr, kernel);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    o.CopyTo(data.o);
    lse.CopyTo(data.lse);
  }
  void ExpectMatches(
      const AttentionCase& shape, absl::FunctionRef<void(AttentionData&)> change = [](AttentionData&) {}) {
    SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_, ": ", shape.DebugString()));
    AttentionData before(shape, random_);
    change(before);
    AttentionData after = before;
    ASSERT_NO_FATAL_FAILURE(Run(shape, after, GetParam()));
    ExpectReferenceState(shape, before, after);
  }

  const uint32_t seed_ = TestSeed();
  std::mt19937 random_{seed_};
  CudaDeviceTraits device_;
};

// Little enough for compute-sanitizer, which makes each instruction many times slower.
TEST_P(CudaAttentionTest, SmallBlocksMatchTheReference) {
  for (const int head_dim : {64, 96, 128, 256}) {
    AttentionCase shape{.head_dim = head_dim, .group = 2, .q_tokens = 130, .k_tokens = 270, .carry_in = true};
    shape.band.q.base = 140;
    ExpectMatches(shape);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaAttentionTest, EveryHeadDimMatchesTheReference) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const DType dtype : {DType::kBf16, DType::kF16}) {
      for (const int group : {1, 2, 4, 8, 16}) {
        AttentionCase shape{
            .dtype = dtype, .head_dim = head_dim, .group = group, .q_tokens = 201, .k_tokens = 333};
        shape.band.q.base = 132;
        ExpectMatches(shape);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CudaAttentionTest, RandomBlocksMatchTheReference) {
  for (int draw = 0; draw < 100; ++draw) {
    ExpectMatches(RandomAttentionCase(random_, {8, 40, 64, 72, 80, 88, 96, 112, 128, 136, 192, 256}, 900));
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaAttentionTest, WindowsAreMaskedAtBothEnds) {
  for (const int head_dim : {64, 96, 128, 256}) {
    ExpectMatches(MaskedAtBothEnds(random_, head_dim));
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaAttentionTest, ScoresThatGrowAlongTheRow) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const bool towards_the_end : {false, true}) {
      AttentionCase shape{.head_dim = head_dim, .kv_heads = 2, .group = 2, .q_tokens = 600, .k_tokens = 5000};
      shape.band.q.base = 5000;
      ExpectMatches(shape, [&](AttentionData& data) { GrowScores(shape, towards_the_end, data); });
      if (HasFatalFailure()) return;
    }
  }
}

// Two kernels with nothing in common but the softmax, on more tiles than there are multiprocessors; and each
// time the same bits, with and without a margin.
TEST_P(CudaAttentionTest, ManyTilesAgreeWithTheOtherKernel) {
  for (const int head_dim : {64, 96, 128, 256}) {
    AttentionCase shape{.head_dim = head_dim, .kv_heads = 4, .group = 4, .q_tokens = 4000, .k_tokens = 4100};
    shape.band.q.base = 100;
    SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_, ": ", shape.DebugString()));
    const AttentionData before(shape, random_);
    AttentionData first = before, other = before;
    ASSERT_NO_FATAL_FAILURE(Run(shape, first, GetParam()));
    for (const int margin : {0, 0, 1, 8}) {
      device_.margin_multiprocessors = margin;
      AttentionData again = before;
      ASSERT_NO_FATAL_FAILURE(Run(shape, again, GetParam()));
      ASSERT_EQ(std::memcmp(first.o.data(), again.o.data(), 4 * first.o.size()), 0) << "margin " << margin;
      ASSERT_EQ(std::memcmp(first.lse.data(), again.lse.data(), 4 * first.lse.size()), 0)
          << "margin " << margin;
    }
    if (GetParam() == CudaAttentionKernel::kSm80) continue;
    ASSERT_NO_FATAL_FAILURE(Run(shape, other, CudaAttentionKernel::kSm80));
    for (int64_t row = 0; row < shape.rows(); ++row) ASSERT_NEAR(first.lse[row], other.lse[row], 1e-4) << row;
    for (int64_t i = 0; i < shape.rows() * head_dim; ++i) ASSERT_NEAR(first.o[i], other.o[i], 0.03) << i;
  }
}

// A million keys of peaked scores: what a key tile loses would be a thousandth here.
TEST_P(CudaAttentionTest, ManyKeysDoNotDrift) {
  AttentionCase shape{.head_dim = 64, .q_tokens = 8, .k_tokens = 1 << 20};
  shape.band.q.base = shape.k_tokens;
  SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed_));
  AttentionData data(shape, random_);
  for (uint16_t& q : data.q) q = BFloat16::FromFloat(3.5f * BFloat16{q}.ToFloat()).bits;
  ASSERT_NO_FATAL_FAILURE(Run(shape, data, GetParam()));
  const double scale = data.Args(shape).scale;
  std::vector<double> scores(shape.k_tokens);
  for (int64_t row = 0; row < shape.q_tokens; ++row) {
    for (int64_t key = 0; key < shape.k_tokens; ++key) {
      scores[key] = 0;
      for (int i = 0; i < 64; ++i) {
        scores[key] +=
            scale * BFloat16{data.q[row * 64 + i]}.ToFloat() * BFloat16{data.k[key * 64 + i]}.ToFloat();
      }
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - max);
    EXPECT_NEAR(data.lse[row], max + std::log(sum), 4e-4) << "row " << row;
  }
}

TEST_P(CudaAttentionTest, RefusesWhatItDoesNotCompute) {
  AttentionCase shape{.q_tokens = 10, .k_tokens = 10};
  AttentionData data(shape, random_);
  const auto message = [&](const AttentionBlockArgs& args, DType dtype, const CudaDeviceTraits& device) {
    return std::string(CudaAttentionBlock(args, dtype, device, nullptr, GetParam()).message());
  };
  AttentionBlockArgs args = data.Args(shape);
  args.head_dim = 60;
  EXPECT_EQ(message(args, DType::kBf16, device_),
            "cuda attention: head_dim is 60; use a multiple of 8 up to 256");
  args = data.Args(shape);
  args.q = static_cast<const char*>(args.q) + 2;
  EXPECT_EQ(message(args, DType::kBf16, device_),
            "cuda attention: q, k and v must begin at multiples of 16 bytes, o of 8");
  EXPECT_EQ(message(data.Args(shape), DType::kF32, device_), "cuda attention: dtype is f32; use bf16 or f16");
  CudaDeviceTraits old = device_;
  old.compute_major = 7, old.compute_minor = 5;
  EXPECT_NE(message(data.Args(shape), DType::kBf16, old), "");
}

TEST_P(CudaAttentionTest, TheBenchmarkMeasures) {
  const CudaAttentionBenchOptions options{.tokens = 2048, .kernel = GetParam(), .repeats = 3};
  const absl::StatusOr<CudaAttentionBenchResult> result = BenchCudaAttention(options, device_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->flops_per_second, 1e12);
  EXPECT_LT(result->flops_per_second, 3e15);
}

std::vector<CudaAttentionKernel> KernelsOfThisDevice() {
  const absl::StatusOr<CudaDeviceTraits> device = ReadCudaDeviceTraits(0);
  if (device.ok() && device->compute_major == 9)
    return {CudaAttentionKernel::kSm80, CudaAttentionKernel::kSm90};
  std::printf("the sm90 kernel is not tested: the device does not run it\n");
  return {CudaAttentionKernel::kSm80};
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaAttentionTest, testing::ValuesIn(KernelsOfThisDevice()),
                         [](const auto& info) {
                           return info.param == CudaAttentionKernel::kSm80 ? "sm80" : "sm90";
                         });

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    std::printf("not run: no CUDA device (%s)\n", cudaGetErrorString(error));
    return 77;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
