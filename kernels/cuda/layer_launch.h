// How wide a layer's kernels may read and write, and how many rows they take: decided on the host, before the
// launch.
#ifndef MESHFILL_KERNELS_CUDA_LAYER_LAUNCH_H_
#define MESHFILL_KERNELS_CUDA_LAYER_LAUNCH_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/narrow_matrix.h"
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

// True where eight elements at a time are widened to `to`, and share a scale.
inline bool WidensVectors(std::span<const NarrowMatrix> matrices, int64_t width, const BFloat16* to) {
  if (!FitsVectors(to, DType::kBf16, 8, {width})) return false;
  return std::all_of(matrices.begin(), matrices.end(), [width](const NarrowMatrix& matrix) {
    const uint32_t bytes = matrix.fp4 ? 4 : 8, columns = matrix.scale_columns.value();
    return reinterpret_cast<uintptr_t>(matrix.rows) % bytes == 0 && matrix.row_bytes % bytes == 0 &&
           (columns >= width || columns % 8 == 0);
  });
}

// Kernels that divide a row's number take it in 32 bits (divisor.h): of bf16 heads of 128, that is a
// terabyte.
inline absl::Status RowsFitDivisor(const char* name, int64_t rows) {
  if (rows < int64_t{1} << 32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": ", rows, " rows of heads; a launch takes fewer than 2^32, use more ranks"));
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_LAYER_LAUNCH_H_
