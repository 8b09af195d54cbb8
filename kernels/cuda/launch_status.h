// An error of the CUDA runtime as a status.
#ifndef MESHFILL_KERNELS_CUDA_LAUNCH_STATUS_H_
#define MESHFILL_KERNELS_CUDA_LAUNCH_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace meshfill {

inline absl::Status LaunchStatus(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_LAUNCH_STATUS_H_
