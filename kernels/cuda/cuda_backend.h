// The CUDA backend: own kernels, cuBLASLt for the linear layers; bf16.
#ifndef MESHFILL_KERNELS_CUDA_CUDA_BACKEND_H_
#define MESHFILL_KERNELS_CUDA_CUDA_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/device.h"

namespace meshfill {

// A rank's, with a stream of its own; several ranks may share a device. Computes in bf16; head_dim must be a
// multiple of 8. Its buffers and weights may outlive it; a weight serves every backend of its device. The
// host runs at most two attention blocks ahead of the device, so that a stop token ends a run within about a
// block. FAILED_PRECONDITION: a build without CUDA, or a machine without cuBLASLt. UNAVAILABLE: the device
// has failed, in this and in every later call of the process (Backend::lost).
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaDevice& device);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_CUDA_BACKEND_H_
