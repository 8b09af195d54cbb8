// A weight's elements in FP8 or MXFP4 on a device, as a kernel that widens them reads them.
#ifndef MESHFILL_KERNELS_CUDA_NARROW_MATRIX_H_
#define MESHFILL_KERNELS_CUDA_NARROW_MATRIX_H_

#include <cstdint>

#include "kernels/cuda/divisor.h"

namespace meshfill {

// A row has its elements as the file has them (WeightRows of kernels/device.h), and its scales behind them:
// f32 of FP8, E8M0 of MXFP4.
struct NarrowMatrix {
  const uint8_t* rows;
  uint32_t row_bytes;     // from one row to the next
  uint32_t scales_at;     // from a row to its scales
  Divisor scale_columns;  // columns that share a scale
  bool fp4;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_NARROW_MATRIX_H_
