// A linear layer against the register loop: `meshfill bench gemm`.
#ifndef MESHFILL_KERNELS_CPU_BENCH_GEMM_BENCH_H_
#define MESHFILL_KERNELS_CPU_BENCH_GEMM_BENCH_H_

#include "absl/status/statusor.h"
#include "kernels/kernel_bench.h"

namespace meshfill {

// Random inputs, the same at every call. Each repeat measures the layer and then at once, for about as long,
// the register loop of the widest instruction set, which is the result's target. INVALID_ARGUMENT names the
// option that is out of range.
absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_BENCH_GEMM_BENCH_H_
