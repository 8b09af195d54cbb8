// What a device's own kernels are measured by, and what comes of it: `meshfill bench attention` and
// `bench gemm`.
#ifndef MESHFILL_KERNELS_KERNEL_BENCH_H_
#define MESHFILL_KERNELS_KERNEL_BENCH_H_

#include <cstdint>
#include <string>

#include "kernels/dtype.h"

namespace meshfill {

// Causal attention of one block.
struct AttentionBenchOptions {
  DType dtype = DType::kBf16;  // bf16 or f32
  int head_dim = 128;          // 1 to 256
  int q_heads = 1;
  int kv_heads = 1;        // divides q_heads
  int64_t tokens = 16384;  // queries and keys, ≥ 1
  int threads = 1;         // CPU threads
  std::string target;      // CPU only: one of SupportedAttentionTargets(); empty: the widest
  int repeats = 5;         // ≥ 1
};

// A linear layer, y = x Wᵀ.
struct GemmBenchOptions {
  DType dtype = DType::kBf16;   // bf16 or f32
  int64_t tokens = 1024;        // ≥ 1; rows of x
  int64_t in_features = 4096;   // ≥ 1
  int64_t out_features = 4096;  // ≥ 1
  int threads = 1;              // CPU threads
  int repeats = 5;              // ≥ 1
};

// Medians over the repeats. FLOPs: 4 · head_dim for each visible pair of each query head; 2 · tokens ·
// in_features · out_features.
struct KernelBenchResult {
  std::string target;                // what computed it: "avx512_bf16", "NVIDIA H100 80GB HBM3"
  double seconds = 0;                // seconds of one run
  double flops_per_second = 0;       // the kernel's speed
  double peak_flops_per_second = 0;  // register loop beside each repeat, or data sheet; 0: not known
  double ratio = 0;  // to the register loop: median of the repeats' own; 0: a data sheet's peak
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_KERNEL_BENCH_H_
