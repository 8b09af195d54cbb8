#include "kernels/cuda/device_traits.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch_status.h"

namespace meshfill {

absl::StatusOr<CudaDeviceTraits> ReadCudaDeviceTraits(int device) {
  int shared_bytes = 0, l2_bytes = 0;
  CudaDeviceTraits traits;
  const struct {
    int* value;
    cudaDeviceAttr attribute;
  } attributes[] = {{&traits.compute_major, cudaDevAttrComputeCapabilityMajor},
                    {&traits.compute_minor, cudaDevAttrComputeCapabilityMinor},
                    {&traits.multiprocessors, cudaDevAttrMultiProcessorCount},
                    {&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                    {&l2_bytes, cudaDevAttrL2CacheSize}};
  for (const auto& [value, attribute] : attributes) {
    if (cudaError_t error = cudaDeviceGetAttribute(value, attribute, device); error != cudaSuccess) {
      return LaunchStatus("reading the device's attributes", error);
    }
  }
  traits.shared_bytes_per_block = shared_bytes;
  traits.l2_bytes = l2_bytes;
  return traits;
}

}  // namespace meshfill
