// How wide a layer's kernels may read and write: decided on the host, before the launch.
#ifndef MESHFILL_KERNELS_CUDA_LAYER_LAUNCH_H_
#define MESHFILL_KERNELS_CUDA_LAYER_LAUNCH_H_

#include <cstdint>
#include <initializer_list>

#include "kernels/stream.h"

namespace meshfill {

// True where vectors of `elements` elements may be read from `pointer` at multiples of `strides` elements.
inline bool FitsVectors(const void* pointer, DType dtype, int elements,
                        std::initializer_list<int64_t> strides) {
  if (reinterpret_cast<uintptr_t>(pointer) % (elements * DTypeBytes(dtype)) != 0) return false;
  for (const int64_t stride : strides) {
    if (stride % elements != 0) return false;
  }
  return true;
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_LAYER_LAUNCH_H_
