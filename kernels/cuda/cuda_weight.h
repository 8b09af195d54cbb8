// A linear layer's weight on a CUDA device: its elements in the rows of the file, in bf16, or in FP8 or
// MXFP4, which stay so and are widened to bf16 before each product.
//
//     bf16     | elements | elements | …
//     narrow   | elements | scales | · | elements | scales | · | …     rows begin where 16 bytes do
#ifndef MESHFILL_KERNELS_CUDA_CUDA_WEIGHT_H_
#define MESHFILL_KERNELS_CUDA_CUDA_WEIGHT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/device.h"

namespace meshfill {

// Immutable once packed; any thread may read it.
class CudaWeight final : public PackedWeight {
 public:
  CudaWeight(int64_t out_features, int64_t in_features, const ElementKind& kind, BufferRef rows)
      : PackedWeight(out_features, in_features), kind(kind), rows(std::move(rows)) {}
  bool narrow() const { return kind.dtype != DType::kBf16; }

  const ElementKind kind;  // of bf16, FP8 or MXFP4
  const BufferRef rows;
  BufferRef bias_f32;   // [out], or null
  BufferRef bias_bf16;  // [out], or null
};

// What follows is enqueued on the lane that loads weights. Of host memory all has been read when it returns.

// Device::PackWeight.
absl::StatusOr<std::unique_ptr<CudaWeight>> PackCudaWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features, const CudaLane& lane);
// Device::FormOf, PackPanels and WeightOf: a panel is a row.
PackedForm CudaWeightForm(int64_t out_features, int64_t in_features, const ElementKind& kind);
absl::StatusOr<BufferRef> PackCudaRows(std::span<const WeightRows> rows, int64_t in_features, int64_t first,
                                       int64_t count, const CudaLane& lane);
absl::StatusOr<std::unique_ptr<CudaWeight>> CudaWeightOfRows(int64_t out_features, int64_t in_features,
                                                             const ElementKind& kind, BufferRef rows,
                                                             std::span<const float> bias,
                                                             const CudaLane& lane);

// Matrices in bf16, [out, in] each: those of wide weights, and what narrow ones were widened into.
struct WidenedMatrices {
  std::vector<const BFloat16*> matrix;  // by weight
  BufferRef scratch;                    // null: all are wide
};
// Enqueued. The weights, one or more, are of one shape. Scratch memory is that of the narrow ones in bf16.
absl::StatusOr<WidenedMatrices> WidenMatrices(std::span<const CudaWeight* const> weights,
                                              const CudaLane& lane);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_CUDA_WEIGHT_H_
