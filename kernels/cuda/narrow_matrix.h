// A weight's elements in FP8 or MXFP4 on a device, as a kernel that widens them reads them.
#ifndef MESHFILL_KERNELS_CUDA_NARROW_MATRIX_H_
#define MESHFILL_KERNELS_CUDA_NARROW_MATRIX_H_

#include <cstdint>

#include "kernels/cuda/divisor.h"

namespace meshfill {

// The elements are in the rows of the file (WeightRows of kernels/device.h).
struct NarrowMatrix {
  const uint8_t* elements;
  const void* scales;      // [rows, scales_of_row]: f32 of FP8, E8M0 of MXFP4
  Divisor scale_columns;   // columns that share a scale
  uint32_t scales_of_row;  // ⌈columns / scale_columns⌉
  bool fp4;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_NARROW_MATRIX_H_
