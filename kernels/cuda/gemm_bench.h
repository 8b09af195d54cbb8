// A linear layer on a CUDA device: `meshfill bench gemm --device cuda`.
#ifndef MESHFILL_KERNELS_CUDA_GEMM_BENCH_H_
#define MESHFILL_KERNELS_CUDA_GEMM_BENCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_info.h"

namespace meshfill {

struct CudaGemmBenchOptions {
  int64_t tokens = 1024;  // ≥ 1, as all of these
  int64_t in_features = 4096;
  int64_t out_features = 4096;
  int repeats = 30;  // each timed by itself after one that is not
};

struct CudaGemmBenchResult {
  double seconds;           // seconds of one y = x Wᵀ in bf16, the median, by the device's clock
  double flops_per_second;  // 2 · tokens · in_features · out_features FLOPs
};

// Random inputs, the same at every call. Errors are the backend's.
absl::StatusOr<CudaGemmBenchResult> BenchCudaGemm(const CudaGemmBenchOptions& options,
                                                  const CudaDeviceInfo& device);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_GEMM_BENCH_H_
