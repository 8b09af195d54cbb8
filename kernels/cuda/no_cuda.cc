// What a build without CUDA answers to those who ask for its devices.
#include "kernels/cuda/attention_bench.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/device_info.h"

namespace meshfill {
namespace {

absl::Status NoCuda() {
  return absl::FailedPreconditionError(
      "this build has no CUDA; build it where nvcc is, with MESHFILL_CUDA=ON");
}

}  // namespace

absl::StatusOr<std::vector<CudaDeviceInfo>> FindCudaDevices() { return NoCuda(); }
absl::StatusOr<int64_t> FreeCudaMemoryBytes(const CudaDeviceInfo&) { return NoCuda(); }
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(const CudaDeviceInfo&) { return NoCuda(); }
absl::StatusOr<CudaAttentionBenchResult> BenchCudaAttention(const CudaAttentionBenchOptions&,
                                                            const CudaDeviceTraits&) {
  return NoCuda();
}

}  // namespace meshfill
