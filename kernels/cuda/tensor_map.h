// Tensor maps for the copy engine (TMA).
#ifndef MESHFILL_KERNELS_CUDA_TENSOR_MAP_H_
#define MESHFILL_KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/dtype.h"

namespace meshfill {

// The map of [heads, tokens, head_dim], bf16 or f16, read in boxes of `box_rows` tokens × one slab of
// `box_columns`, 64 or 32, of one head, swizzled by 128 or 64 bytes (fragments.h); rows and columns outside
// are zero. `tensor` is a multiple of 16, head_dim of 8, box_rows at most 256. INTERNAL where the driver
// lacks tensor maps or refuses this one.
absl::Status EncodeHeadsMap(const void* tensor, DType dtype, uint32_t heads, uint32_t tokens,
                            uint32_t head_dim, uint32_t box_rows, uint32_t box_columns, CUtensorMap* map);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_TENSOR_MAP_H_
