// LaunchAttentionSm80, for the sources that instantiate it.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_SM80_LAUNCH_CUH_
#define MESHFILL_KERNELS_CUDA_ATTENTION_SM80_LAUNCH_CUH_

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_sm80.cuh"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/ptx_sm80.cuh"

namespace meshfill {

template <class T, int kDim>
__global__ void __launch_bounds__(Sm80Config<kDim>::kThreads)
    Sm80AttentionKernel(const __grid_constant__ AttentionParams params,
                        const __grid_constant__ QueryTiles<Sm80Config<kDim>::kRows> tiles) {
  extern __shared__ __align__(128) unsigned char shared[];
  Sm80Attention<PtxSm80, T, kDim>::Run(params, tiles,
                                       static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
}

template <int kDim>
absl::Status LaunchAttentionSm80(const AttentionParams& params, DType dtype, const CudaDeviceTraits& device,
                                 CUstream_st* stream) {
  using Config = Sm80Config<kDim>;
  const auto kernel =
      dtype == DType::kBf16 ? Sm80AttentionKernel<__nv_bfloat16, kDim> : Sm80AttentionKernel<__half, kDim>;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
      error != cudaSuccess) {
    return LaunchStatus("attention, sm80 kernel", error);
  }
  // No margin (device_traits.h): a CTA ends with its tile, and those of communication, whose stream goes
  // first, take the room. CTAs that stayed would hold half of a multiprocessor each, which is too little for
  // NCCL's.
  const QueryTiles<Config::kRows> tiles(params.shape);
  kernel<<<tiles.count(), Config::kThreads, Config::kSharedBytes, stream>>>(params, tiles);
  return LaunchStatus("attention, sm80 kernel", cudaGetLastError());
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_SM80_LAUNCH_CUH_
