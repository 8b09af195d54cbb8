// Causal attention of one block on a CUDA device, timed by events: `meshfill bench attention --device cuda`.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_BENCH_H_
#define MESHFILL_KERNELS_CUDA_ATTENTION_BENCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/device_traits.h"
#include "kernels/dtype.h"

namespace meshfill {

struct CudaAttentionBenchOptions {
  DType dtype = DType::kBf16;  // bf16 or f16
  int head_dim = 128;
  int q_heads = 32;
  int kv_heads = 8;        // divides q_heads
  int64_t tokens = 16384;  // queries and keys, ≥ 1
  bool causal = true;      // false: every query sees every key
  bool carry_in = false;   // read and merge a carried state
  CudaAttentionKernel kernel = CudaAttentionKernel::kFastest;
  int repeats = 30;  // ≥ 1, each timed by itself after three that are not
};

struct CudaAttentionBenchResult {
  double seconds;  // seconds of one attention, median of the repeats
  double fastest_seconds;
  double slowest_seconds;
  double flops_per_second;  // 4 · head_dim FLOPs for each visible pair of each query head, over the median
};

// On the current device of this thread. Random inputs, the same at every call. Fails as CudaAttentionBlock
// does, and with RESOURCE_EXHAUSTED where device memory is short, with the bytes needed.
absl::StatusOr<CudaAttentionBenchResult> BenchCudaAttention(const CudaAttentionBenchOptions& options,
                                                            const CudaDeviceTraits& device);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_BENCH_H_
