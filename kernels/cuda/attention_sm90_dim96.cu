#include "kernels/cuda/attention_sm90_launch.cuh"

namespace meshfill {

template absl::Status LaunchAttentionSm90<96>(const AttentionParams&, DType, const CudaDeviceTraits&,
                                              CUstream_st*);

}  // namespace meshfill
