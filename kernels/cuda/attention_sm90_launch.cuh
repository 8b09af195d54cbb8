// LaunchAttentionSm90, for the sources that instantiate it.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_SM90_LAUNCH_CUH_
#define MESHFILL_KERNELS_CUDA_ATTENTION_SM90_LAUNCH_CUH_

#include <algorithm>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_sm90.cuh"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/return_if_error.h"

namespace meshfill {

template <class T, int kDim>
__global__ void __launch_bounds__(Sm90Config<kDim>::kThreads, 1)
    Sm90AttentionKernel(const __grid_constant__ AttentionParams params,
                        const __grid_constant__ QueryTiles<Sm90Config<kDim>::kRows> tiles,
                        const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                        const __grid_constant__ CUtensorMap v) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared[];
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  Sm90Attention<PtxSm90, T, kDim>::Run(params, tiles, {&q, &k, &v},
                                       (address + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes);
#endif
}

template <int kDim>
absl::Status LaunchAttentionSm90(const AttentionParams& params, DType dtype, const CudaDeviceTraits& device,
                                 CUstream_st* stream) {
  using Config = Sm90Config<kDim>;
  constexpr uint32_t kSharedBytes = Config::kSharedBytes + kSwizzleBytes;
  const BlockShape& shape = params.shape;
  CUtensorMap q, k, v;
  struct {
    CUtensorMap* map;
    const void* tensor;
    uint32_t heads, tokens, box_rows;
  } const tensors[] = {{&q, params.q, shape.q_heads, shape.q_tokens, Config::kRows},
                       {&k, params.k, shape.kv_heads(), shape.k_tokens, Config::kKeys},
                       {&v, params.v, shape.kv_heads(), shape.k_tokens, Config::kKeys}};
  for (const auto& [map, tensor, heads, tokens, box_rows] : tensors) {
    // An empty chunk has no address, which drivers before CUDA 12.6 refuse; nothing reads its map.
    RETURN_IF_ERROR(EncodeHeadsMap(tokens == 0 ? params.q : tensor, dtype, heads, tokens, shape.head_dim,
                                   box_rows, Config::kColumnsOfSlab, map));
  }
  const auto kernel =
      dtype == DType::kBf16 ? Sm90AttentionKernel<__nv_bfloat16, kDim> : Sm90AttentionKernel<__half, kDim>;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return LaunchStatus("attention, sm90 kernel", error);
  }
  const int ctas = std::max(1, device.multiprocessors - device.margin_multiprocessors);
  const QueryTiles<Config::kRows> tiles(shape);
  const uint32_t grid = std::min(tiles.count(), static_cast<uint32_t>(ctas));
  kernel<<<grid, Config::kThreads, kSharedBytes, stream>>>(params, tiles, q, k, v);
  return LaunchStatus("attention, sm90 kernel", cudaGetLastError());
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_SM90_LAUNCH_CUH_
