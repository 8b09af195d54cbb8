// The CUDA devices that this process may compute on. No CUDA header is needed to ask: a build without CUDA
// answers that it has none (no_cuda.cc).
#ifndef MESHFILL_KERNELS_CUDA_DEVICE_INFO_H_
#define MESHFILL_KERNELS_CUDA_DEVICE_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_traits.h"

namespace meshfill {

struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;  // as the driver says it: "NVIDIA H100 80GB HBM3"
  CudaDeviceTraits traits;
  int64_t memory_bytes = 0;
};

// The devices with compute capability 8.0 or later, by their ordinals; at least one. FAILED_PRECONDITION says
// why there is none: a build without CUDA, no driver, a driver older than the build's CUDA (both versions),
// no GPU, or only older GPUs.
absl::StatusOr<std::vector<CudaDeviceInfo>> FindCudaDevices();

// Bytes that are free now on a device that FindCudaDevices found.
absl::StatusOr<int64_t> FreeCudaMemoryBytes(const CudaDeviceInfo& device);

// Dense bf16 FLOP/s from the data sheet of the product with this name, against which MFU is stated; 0: not in
// the table.
double CudaPeakFlops(const std::string& name);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_DEVICE_INFO_H_
