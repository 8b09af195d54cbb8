// A linear layer against the register loop: `meshfill bench gemm`.
#ifndef MESHFILL_KERNELS_CPU_GEMM_BENCH_H_
#define MESHFILL_KERNELS_CPU_GEMM_BENCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"

namespace meshfill {

struct GemmBenchOptions {
  DType dtype = DType::kBf16;   // bf16 or f32
  int64_t tokens = 1024;        // ≥ 1; rows of x
  int64_t in_features = 4096;   // ≥ 1
  int64_t out_features = 4096;  // ≥ 1
  int threads = 1;
  int repeats = 5;  // ≥ 1
};

// Medians over the repeats, each of which measures the layer and then at once the register loop for about as
// long.
struct GemmBenchResult {
  double seconds;                // of one y = x Wᵀ
  double flops_per_second;       // 2 · tokens · in_features · out_features FLOPs
  double peak_flops_per_second;  // the register loop of the widest instruction set on as many threads
  double ratio;                  // median of the repeats' own ratios
};

// Random inputs, the same at every call. INVALID_ARGUMENT names the option that is out of range.
absl::StatusOr<GemmBenchResult> BenchGemm(const GemmBenchOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_GEMM_BENCH_H_
