// Launches of a layer's element-wise operations on a CUDA stream: Stream's operations (kernels/stream.h),
// on device pointers, in bf16. Each enqueues one kernel and returns at once. INTERNAL where the driver
// refuses the launch.
#ifndef MESHFILL_KERNELS_CUDA_LAYER_OPS_H_
#define MESHFILL_KERNELS_CUDA_LAYER_OPS_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/cuda/narrow_matrix.h"
#include "kernels/dtype.h"
#include "kernels/stream.h"

struct CUstream_st;

namespace meshfill {

absl::Status LaunchEmbed(const uint32_t* ids, int64_t tokens, const void* table, DType table_dtype,
                         int64_t width, float* x, CUstream_st* stream);
absl::Status LaunchRmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                           BFloat16* y, CUstream_st* stream);
absl::Status LaunchAddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                              float* x, CUstream_st* stream);
absl::Status LaunchScale(float* x, int64_t count, float factor, CUstream_st* stream);
// head_dim a multiple of 4.
absl::Status LaunchSplitQkv(const SplitQkvArgs& args, CUstream_st* stream);
absl::Status LaunchMergePartial(const MergePartialArgs& args, CUstream_st* stream);
absl::Status LaunchApplySinks(const ApplySinksArgs& args, CUstream_st* stream);
absl::Status LaunchCopyHeads(const CopyHeadsArgs& args, CUstream_st* stream);
absl::Status LaunchActivate(const ActivateArgs& args, CUstream_st* stream);
// Converts f32, bf16 or f16 to f32 or bf16.
absl::Status LaunchConvert(const void* from, DType from_dtype, int64_t count, DType to_dtype, void* to,
                           CUstream_st* stream);

// Matrices of one shape in FP8 or MXFP4.
struct WidenArgs {
  std::span<const NarrowMatrix> matrices;
  const NarrowMatrix* on_device;  // the same, there
  int64_t rows, width;            // of each; width even where one is of MXFP4
  BFloat16* to;                   // [matrices, rows, width]
};
// Each element times its scale, in f32, rounded to bf16.
absl::Status LaunchWiden(const WidenArgs& args, CUstream_st* stream);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_LAYER_OPS_H_
