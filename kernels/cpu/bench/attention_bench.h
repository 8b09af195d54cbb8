// Causal attention of one block against the register loop: `meshfill bench attention`.
#ifndef MESHFILL_KERNELS_CPU_BENCH_ATTENTION_BENCH_H_
#define MESHFILL_KERNELS_CPU_BENCH_ATTENTION_BENCH_H_

#include "absl/status/statusor.h"
#include "kernels/kernel_bench.h"

namespace meshfill {

// Random inputs, the same at every call. Each repeat measures the attention and then at once the target's
// register loop on as many threads for about as long, by its average: a clock that drifts or a busy neighbour
// meets both. INVALID_ARGUMENT names the option that is out of range.
absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_BENCH_ATTENTION_BENCH_H_
