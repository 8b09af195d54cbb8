// A GPU as a device: own kernels, cuBLASLt for the linear layers; bf16.
#ifndef MESHFILL_KERNELS_CUDA_CUDA_DEVICE_H_
#define MESHFILL_KERNELS_CUDA_CUDA_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_info.h"
#include "kernels/device.h"

namespace meshfill {

// Each stream of it is a CUDA stream. Computes in bf16; head_dim must be a multiple of 8. A weight serves the
// streams of this device. The host runs at most two attention blocks ahead of the device, so that a stop
// token ends a run within about a block. Which algorithm multiplies a shape is this object's choice (gemm.h):
// ranks that are to compute alike share it. FAILED_PRECONDITION: a build without CUDA, or a machine without
// cuBLASLt. UNAVAILABLE: the device has failed, in this and in every later call of the process
// (Device::lost).
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(const CudaDeviceInfo& info);

// What keeps a GPU busy. A test's device, which the host plays, has one of its own.
Grain CudaGrain();

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_CUDA_DEVICE_H_
