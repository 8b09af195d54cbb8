// What GPUs that are here are used with, and plans for GPUs that are not (docs/planning.md).
#ifndef MESHFILL_KERNELS_GPU_DEFAULTS_H_
#define MESHFILL_KERNELS_GPU_DEFAULTS_H_

#include <cstdint>

namespace meshfill {

// Tokens of a chunk that a layer's operations take at a time. In slices of 1024 the first product of an 8B
// model's layer has 192 tiles of 256 × 128 for an H100's 132 multiprocessors, which is one wave and a half;
// in slices of 4096 it has 768, near six.
inline constexpr int64_t kGpuSliceTokens = 4096;

// Percent of the memory that the weights leave. The rest is for fragmentation, and for NCCL.
inline constexpr int64_t kGpuUsablePercent = 85;

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_GPU_DEFAULTS_H_
