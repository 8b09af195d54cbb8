// Launches of an MLP of experts on a CUDA stream: Stream's operations (kernels/stream.h), on device pointers,
// in bf16. Each enqueues its kernels and returns at once. INTERNAL where the driver refuses a launch.
#ifndef MESHFILL_KERNELS_CUDA_EXPERT_OPS_H_
#define MESHFILL_KERNELS_CUDA_EXPERT_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/expert_gemm.cuh"
#include "kernels/experts.h"

struct CUstream_st;

namespace meshfill {

absl::Status LaunchRoute(const RouteArgs& args, CUstream_st* stream);
// `rows`: of all experts together.
absl::Status LaunchExpertGemm(const ExpertProducts& products, int64_t rows, CUstream_st* stream);
absl::Status LaunchAddExperts(const AddExpertsArgs& args, CUstream_st* stream);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_EXPERT_OPS_H_
