#include "kernels/cuda/attention_sm80_launch.cuh"

namespace meshfill {

template absl::Status LaunchAttentionSm80<128>(const AttentionParams&, DType, const CudaDeviceTraits&,
                                               CUstream_st*);

}  // namespace meshfill
