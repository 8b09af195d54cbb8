#include "kernels/cuda/health.h"

#include "absl/strings/str_cat.h"

namespace meshfill {

absl::Status CudaHealth::Diagnose(const absl::Status& error, const CudaQueue& queue) {
  const ScopedCudaDevice scope(queue.device());
  cudaGetLastError();
  const cudaError_t now = cudaStreamQuery(queue.get());
  if (now == cudaSuccess || now == cudaErrorNotReady) return error;
  lost_ = true;
  return absl::UnavailableError(absl::StrCat(device_, " has failed: ", error.message(),
                                             "; start the process anew, and see nvidia-smi"));
}

}  // namespace meshfill
