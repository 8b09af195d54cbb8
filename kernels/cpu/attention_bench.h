// Causal attention of one block against the register loop: `meshfill bench attention`.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_BENCH_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_BENCH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"

namespace meshfill {

struct AttentionBenchOptions {
  DType dtype = DType::kBf16;  // bf16 or f32
  int head_dim = 128;          // 1 to 256
  int q_heads = 1;
  int kv_heads = 1;        // divides q_heads
  int64_t tokens = 16384;  // queries and keys, ≥ 1
  int threads = 1;
  std::string target;  // one of SupportedAttentionTargets(); empty: the widest
  int repeats = 5;     // ≥ 1
};

// Medians over the repeats. Each repeat measures the attention and then at once the register loop for about
// as long, by its average: a clock that drifts or a busy neighbour meets both.
struct AttentionBenchResult {
  std::string target;
  double seconds;                // of one attention
  double flops_per_second;       // 4 · head_dim FLOPs for each visible pair of each query head
  double peak_flops_per_second;  // the target's register loop on as many threads
  double ratio;                  // median of the repeats' own ratios
};

// Random inputs, the same at every call. INVALID_ARGUMENT names the option that is out of range.
absl::StatusOr<AttentionBenchResult> BenchAttention(const AttentionBenchOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_BENCH_H_
