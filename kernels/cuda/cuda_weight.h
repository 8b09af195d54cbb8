// A linear layer's weight on a CUDA device: its elements in the rows of the file, in bf16, or in FP8 or
// MXFP4, which stay so and are widened to bf16 before each product.
#ifndef MESHFILL_KERNELS_CUDA_CUDA_WEIGHT_H_
#define MESHFILL_KERNELS_CUDA_CUDA_WEIGHT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/device.h"

namespace meshfill {

// Immutable once packed; any thread may read it.
class CudaWeight final : public PackedWeight {
 public:
  CudaWeight(int64_t out_features, int64_t in_features, DType dtype)
      : PackedWeight(out_features, in_features), dtype(dtype) {}
  bool narrow() const { return dtype != DType::kBf16; }

  const DType dtype;          // kBf16, kF8E4M3 or kF4E2M1
  BufferRef matrix;           // [out, in], of that dtype
  BufferRef scales;           // narrow ones: [out, ⌈in / scale_columns⌉], f32 of FP8, E8M0 of MXFP4
  int64_t scale_columns = 1;  // input features that share a scale
  BufferRef bias_f32;         // [out], or null
  BufferRef bias_bf16;        // [out], or null
};

// Device::PackWeight, enqueued on the lane that loads weights. All rows have been read when it returns.
absl::StatusOr<std::unique_ptr<CudaWeight>> PackCudaWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features, const CudaLane& lane);

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
