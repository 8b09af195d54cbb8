// The kernels' launchers, one source for each kernel and head_dim, so that they compile side by side.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_LAUNCH_H_
#define MESHFILL_KERNELS_CUDA_ATTENTION_LAUNCH_H_

#include "absl/status/status.h"
#include "kernels/cuda/attention_softmax.cuh"
#include "kernels/cuda/device_traits.h"
#include "kernels/dtype.h"

struct CUstream_st;

namespace meshfill {

// kDim: head_dim rounded up to what is compiled. The arguments were checked.
template <int kDim>  // 64, 96, 128, 256
absl::Status LaunchAttentionSm80(const AttentionParams& params, DType dtype, const CudaDeviceTraits& device,
                                 CUstream_st* stream);
template <int kDim>  // 64, 96, 128, 256
absl::Status LaunchAttentionSm90(const AttentionParams& params, DType dtype, const CudaDeviceTraits& device,
                                 CUstream_st* stream);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_LAUNCH_H_
