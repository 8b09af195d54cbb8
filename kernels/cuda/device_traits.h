// What a CUDA kernel's launch is shaped by, read off the device once.
#ifndef MESHFILL_KERNELS_CUDA_DEVICE_TRAITS_H_
#define MESHFILL_KERNELS_CUDA_DEVICE_TRAITS_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace meshfill {

struct CudaDeviceTraits {
  int compute_major = 0;  // compute capability: 9.0 is H100 and H200, 8.0 A100
  int compute_minor = 0;
  int multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  // the opt-in limit of dynamic shared memory
  int64_t l2_bytes = 0;
  int margin_multiprocessors = 0;  // left free by persistent kernels, for the CTAs of communication
};

// Reads the traits of device `device`, with no margin. INTERNAL with the runtime's own words where there is
// none.
absl::StatusOr<CudaDeviceTraits> ReadCudaDeviceTraits(int device);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_DEVICE_TRAITS_H_
