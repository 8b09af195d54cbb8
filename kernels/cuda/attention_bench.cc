#include "kernels/cuda/attention_bench.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

struct FreeOnDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, FreeOnDevice>;

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;

absl::StatusOr<DeviceMemory> Allocate(int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    return absl::ResourceExhaustedError(
        absl::StrCat("bench attention: device memory: ", bytes, " bytes were refused"));
  }
  if (error != cudaSuccess) return LaunchStatus("bench attention: cudaMalloc", error);
  return DeviceMemory(memory);
}

// Normal elements on the device: a million of them, over and over.
absl::StatusOr<DeviceMemory> RandomTensor(int64_t elements, DType dtype, std::mt19937& random) {
  constexpr int64_t kPeriod = 1'000'003;  // a prime: rows differ
  std::normal_distribution<float> normal;
  std::vector<uint16_t> period(std::min(elements, kPeriod));
  for (uint16_t& element : period) {
    const uint16_t bf16 = BFloat16::FromFloat(normal(random)).bits;
    // f16's exponent has five bits, its mantissa ten: of a bf16 near 1, the last bits are zeros.
    const int magnitude = std::max(((bf16 & 0x7fff) << 3) - (112 << 10), 0);
    element = dtype == DType::kBf16 ? bf16 : static_cast<uint16_t>((bf16 & 0x8000) | magnitude);
  }
  ASSIGN_OR_RETURN(DeviceMemory tensor, Allocate(2 * elements));
  for (int64_t begin = 0; begin < elements; begin += kPeriod) {
    const size_t bytes = 2 * std::min(elements - begin, kPeriod);
    char* to = static_cast<char*>(tensor.get()) + 2 * begin;
    if (cudaError_t error = cudaMemcpy(to, period.data(), bytes, cudaMemcpyHostToDevice);
        error != cudaSuccess) {
      return LaunchStatus("bench attention: copying the inputs", error);
    }
  }
  return tensor;
}

absl::StatusOr<double> TimeOnce(const AttentionBlockArgs& args, const CudaAttentionBenchOptions& options,
                                const CudaDeviceTraits& device, cudaEvent_t begin, cudaEvent_t end) {
  cudaEventRecord(begin, nullptr);
  RETURN_IF_ERROR(CudaAttentionBlock(args, options.dtype, device, nullptr, options.kernel));
  cudaEventRecord(end, nullptr);
  if (cudaError_t error = cudaEventSynchronize(end); error != cudaSuccess) {
    return LaunchStatus("bench attention", error);
  }
  float milliseconds = 0;
  if (cudaError_t error = cudaEventElapsedTime(&milliseconds, begin, end); error != cudaSuccess) {
    return LaunchStatus("bench attention", error);
  }
  return milliseconds / 1e3;
}

}  // namespace

absl::StatusOr<CudaAttentionBenchResult> BenchCudaAttention(const CudaAttentionBenchOptions& options,
                                                            const CudaDeviceTraits& device) {
  if (options.tokens < 1 || options.repeats < 1) {
    return absl::InvalidArgumentError(absl::StrCat("bench attention: tokens is ", options.tokens,
                                                   ", repeats ", options.repeats, "; use at least 1"));
  }
  const int64_t q_rows = options.tokens * options.q_heads, kv_rows = options.tokens * options.kv_heads;
  std::mt19937 random(1);
  ASSIGN_OR_RETURN(DeviceMemory q, RandomTensor(q_rows * options.head_dim, options.dtype, random));
  ASSIGN_OR_RETURN(DeviceMemory k, RandomTensor(kv_rows * options.head_dim, options.dtype, random));
  ASSIGN_OR_RETURN(DeviceMemory v, RandomTensor(kv_rows * options.head_dim, options.dtype, random));
  ASSIGN_OR_RETURN(DeviceMemory o, Allocate(q_rows * options.head_dim * 4));
  ASSIGN_OR_RETURN(DeviceMemory lse, Allocate(q_rows * 4));
  cudaMemset(o.get(), 0, q_rows * options.head_dim * 4);  // a carried state of zeros
  cudaMemset(lse.get(), 0, q_rows * 4);

  Event begin, end;
  for (Event* event : {&begin, &end}) {
    cudaEvent_t created;
    if (cudaError_t error = cudaEventCreate(&created); error != cudaSuccess) {
      return LaunchStatus("bench attention: cudaEventCreate", error);
    }
    event->reset(created);
  }
  const AttentionBlockArgs args{.q = q.get(),
                                .k = k.get(),
                                .v = v.get(),
                                .q_tokens = options.tokens,
                                .k_tokens = options.tokens,
                                .q_heads = options.q_heads,
                                .kv_heads = options.kv_heads,
                                .head_dim = options.head_dim,
                                .band = {.q = {.base = options.causal ? 0 : options.tokens}},
                                .scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim)),
                                .carry_in = options.carry_in,
                                .o = static_cast<float*>(o.get()),
                                .lse = static_cast<float*>(lse.get())};
  constexpr int kWarmUps = 3;
  std::vector<double> seconds;
  for (int repeat = -kWarmUps; repeat < options.repeats; ++repeat) {
    ASSIGN_OR_RETURN(const double once, TimeOnce(args, options, device, begin.get(), end.get()));
    if (repeat >= 0) seconds.push_back(once);
  }
  std::sort(seconds.begin(), seconds.end());
  const double tokens = static_cast<double>(options.tokens);
  const double pairs = options.causal ? tokens * (tokens + 1) / 2 : tokens * tokens;
  const double median = seconds[seconds.size() / 2];
  return CudaAttentionBenchResult{
      .seconds = median,
      .fastest_seconds = seconds.front(),
      .slowest_seconds = seconds.back(),
      .flops_per_second = 4.0 * options.head_dim * options.q_heads * pairs / median};
}

}  // namespace meshfill
