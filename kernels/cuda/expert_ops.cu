#include <algorithm>

#include "kernels/cuda/expert_kernels.cuh"
#include "kernels/cuda/expert_ops.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_launch.h"
#include "kernels/cuda/ptx_sm80.cuh"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

struct DeviceMachine : PtxSm80 {
  static MESHFILL_DEVICE uint32_t Blocks() { return gridDim.x; }
  template <class T>
  static MESHFILL_DEVICE T Shuffle(T value, uint32_t lane) {
    return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
  }
  static MESHFILL_DEVICE uint32_t Ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
  static MESHFILL_DEVICE uint32_t PopCount(uint32_t bits) { return __popc(bits); }
  static MESHFILL_DEVICE uint32_t LoadShared(uint32_t shared) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
    return value;
  }
  static MESHFILL_DEVICE void StoreShared(uint32_t shared, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
  }
  static MESHFILL_DEVICE void Store16(uint32_t shared, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
  }
  // Waits until at most kInFlight committed groups of copies are under way.
  template <int kInFlight>
  static MESHFILL_DEVICE void CopyWaitBut() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
  }
};
using Kernels = ExpertKernels<DeviceMachine>;

__global__ void __launch_bounds__(kLayerThreads) ChooseExpertsKernel(const __grid_constant__ RouteArgs args) {
  Kernels::Choose(args);
}

__global__ void __launch_bounds__(kLayerThreads) SortRowsKernel(const __grid_constant__ RouteArgs args) {
  __shared__ __align__(16) unsigned char shared[Kernels::kSortSharedBytes];
  Kernels::Sort(args, static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
}

__global__ void __launch_bounds__(kLayerThreads) PlaceRowsKernel(const __grid_constant__ RouteArgs args) {
  Kernels::Place(args);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    AddExpertsKernel(const __grid_constant__ AddExpertsArgs args) {
  Kernels::AddExperts<kVector>(args);
}

template <bool kVectors>
__global__ void __launch_bounds__(ExpertGemmConfig::kThreads, 2)
    ExpertGemmKernel(const __grid_constant__ ExpertProducts products) {
  extern __shared__ __align__(128) unsigned char shared[];
  Sm80ExpertGemm<DeviceMachine, __nv_bfloat16, kVectors>::Run(
      products, static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
}

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

unsigned Blocks(int64_t rows, int64_t rows_each) {
  return static_cast<unsigned>(std::min(kMostBlocks, (rows + rows_each - 1) / rows_each));
}

}  // namespace

absl::Status LaunchRoute(const RouteArgs& args, CUstream_st* stream) {
  if (args.rule.groups > Kernels::kMostGroups) {
    return absl::InvalidArgumentError("cuda: route: more than 2048 groups of experts");
  }
  const int64_t rows = args.tokens * args.rule.used;
  if (rows > 0) {
    ChooseExpertsKernel<<<Blocks(args.tokens, kLayerWarps), kLayerThreads, 0, stream>>>(args);
    RETURN_IF_ERROR(LaunchStatus("choosing experts", cudaGetLastError()));
  }
  SortRowsKernel<<<args.rule.experts, kLayerThreads, 0, stream>>>(args);
  RETURN_IF_ERROR(LaunchStatus("sorting rows by expert", cudaGetLastError()));
  if (rows == 0) return absl::OkStatus();
  PlaceRowsKernel<<<Blocks(rows, kLayerThreads), kLayerThreads, 0, stream>>>(args);
  return LaunchStatus("placing rows", cudaGetLastError());
}

absl::Status LaunchExpertGemm(const ExpertProducts& products, int64_t rows, CUstream_st* stream) {
  using Config = ExpertGemmConfig;
  const int64_t blocks =
      Config::MostRowTiles(rows, products.count) * Config::ColumnTiles(products.out_features);
  if (blocks == 0) return absl::OkStatus();
  if (blocks > kMostBlocks) return absl::InvalidArgumentError("cuda: expert gemm: too many rows at a time");
  // Every matrix begins where the pool's allocations do.
  const bool vectors = FitsVectors(products.x, DType::kBf16, 8, {products.in_features});
  const auto kernel = vectors ? ExpertGemmKernel<true> : ExpertGemmKernel<false>;
  RETURN_IF_ERROR(LaunchStatus(
      "expert gemm",
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes)));
  kernel<<<static_cast<unsigned>(blocks), Config::kThreads, Config::kSharedBytes, stream>>>(products);
  return LaunchStatus("expert gemm", cudaGetLastError());
}

absl::Status LaunchAddExperts(const AddExpertsArgs& args, CUstream_st* stream) {
  if (args.tokens == 0) return absl::OkStatus();
  const bool vectors =
      FitsVectors(args.y, DType::kBf16, 4, {args.width}) && FitsVectors(args.x, DType::kF32, 4, {args.width});
  const auto kernel = vectors ? AddExpertsKernel<4> : AddExpertsKernel<1>;
  kernel<<<Blocks(args.tokens, 1), kLayerThreads, 0, stream>>>(args);
  return LaunchStatus("add experts", cudaGetLastError());
}

}  // namespace meshfill
