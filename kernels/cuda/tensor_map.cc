#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/fragments.h"

namespace meshfill {
namespace {

// The function of the driver that the runtime has loaded: the binary links no libcuda.
PFN_cuTensorMapEncodeTiled_v12000 EncodeTiled() {
  static const auto encode = [] {
    constexpr unsigned int kCuda12 = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kCuda12,
                                                               cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found ? function : nullptr);
  }();
  return encode;
}

}  // namespace

absl::Status EncodeHeadsMap(const void* tensor, DType dtype, uint32_t heads, uint32_t tokens,
                            uint32_t head_dim, uint32_t box_rows, uint32_t box_columns, CUtensorMap* map) {
  const auto encode = EncodeTiled();
  if (encode == nullptr) {
    return absl::InternalError(
        "cuda: the driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12 or later");
  }
  constexpr cuuint32_t kRank = 3;
  const cuuint64_t row_bytes = cuuint64_t{head_dim} * 2;
  // No tokens: the map must not be empty, and nothing reads it.
  const cuuint64_t sizes[kRank] = {head_dim, std::max(tokens, 1u), heads};
  const cuuint64_t strides[kRank - 1] = {row_bytes, row_bytes * sizes[1]};
  const cuuint32_t box[kRank] = {box_columns, box_rows, 1};
  const cuuint32_t element_strides[kRank] = {1, 1, 1};
  const CUresult result = encode(
      map, dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kRank,
      const_cast<void*>(tensor), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_columns == kSlabColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuda: tensor map of ", heads, " heads × ", tokens, " tokens × ",
                                            head_dim, ": driver error ", static_cast<int>(result)));
  }
  return absl::OkStatus();
}

}  // namespace meshfill
