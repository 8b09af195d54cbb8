// A linear layer's weight in the blocked layout that oneDNN's matmul reads fastest.
//
// The layout is that of Wᵀ, [in_features, out_features]. It is cut into panels of output features, the unit
// in which weights are packed and in which one token alone is multiplied:
//
//        out →  panel 0   panel 1   …   last (short)
//     in  [    512      |   512    | … |            ]
//     ↓
#ifndef MESHFILL_KERNELS_CPU_PACKED_MATRIX_H_
#define MESHFILL_KERNELS_CPU_PACKED_MATRIX_H_

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/onednn.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/stream.h"

namespace meshfill {

// A multiple of every block that oneDNN lays weights out in.
inline constexpr int64_t kPanelFeatures = 512;

// The dtype in which this machine multiplies for a compute dtype: bf16 needs AVX-512 (oneDNN emulates the
// products where BF16 instructions are missing); below that, bf16 is widened to f32, which loses speed and
// nothing else.
DType MultiplyDType(DType compute_dtype);

// Immutable. All but the constructor may be called from any thread.
class PackedMatrix final : public PackedWeight {
 public:
  PackedMatrix(dnnl::memory::desc layout, DType dtype, BufferRef elements, std::vector<float> bias)
      : PackedWeight(layout.dims()[1], layout.dims()[0]),
        layout_(layout),
        dtype_(dtype),
        elements_(std::move(elements)),
        bias_(std::move(bias)) {}

  // Columns [begin, begin + columns): their layout, and their first element (not const, as oneDNN's handles
  // are not, though it reads only). `begin` is a multiple of kPanelFeatures; `columns` is too, or reaches the
  // last column.
  struct Columns {
    dnnl::memory::desc layout;
    void* elements;
  };
  Columns ColumnsFrom(int64_t begin, int64_t columns) const {
    return ColumnsFrom(begin, columns, elements_->data<std::byte>());
  }
  // The same of a matrix like this whose first element is at `elements`.
  Columns ColumnsFrom(int64_t begin, int64_t columns, std::byte* elements) const;

  bool has_bias() const { return !bias_.empty(); }
  float* bias(int64_t column) const { return const_cast<float*>(bias_.data()) + column; }

 private:
  dnnl::memory::desc layout_;
  DType dtype_;  // MultiplyDType(compute dtype)
  BufferRef elements_;
  std::vector<float> bias_;  // [out_features] or empty
};

// Stacks the rows, rounds them to `compute_dtype` and packs them, panel by panel on the team: no second copy
// of the whole matrix. At least one row and one input feature. RESOURCE_EXHAUSTED where memory is short.
absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(std::span<const WeightRows> rows,
                                                         int64_t in_features, DType compute_dtype,
                                                         ThreadPool& pool);

// The bytes of such a matrix. UNIMPLEMENTED where oneDNN's layout does not keep each panel's in one piece.
absl::StatusOr<PackedForm> PackedFormOf(int64_t in_features, int64_t out_features, DType compute_dtype);

// The bytes of panels [first, first + panels) alone. Errors: PackMatrix's, and PackedFormOf's.
absl::StatusOr<BufferRef> PackMatrixPanels(std::span<const WeightRows> rows, int64_t in_features,
                                           DType compute_dtype, int64_t first, int64_t panels,
                                           ThreadPool& pool);

// A matrix of all its bytes.
absl::StatusOr<std::unique_ptr<PackedMatrix>> MatrixOfPanels(int64_t in_features, int64_t out_features,
                                                             DType compute_dtype, BufferRef elements,
                                                             std::vector<float> bias);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_PACKED_MATRIX_H_
