// In place of figures of a device: the reference's speed is nobody's, and takes long to find out.
#include "kernels/cuda/attention_bench.h"
#include "kernels/cuda/device_info.h"

namespace meshfill {

double CudaPeakFlops(const std::string&) { return 1e12; }

absl::StatusOr<CudaAttentionBenchResult> BenchCudaAttention(const CudaAttentionBenchOptions&,
                                                            const CudaDeviceTraits&) {
  return absl::UnimplementedError("attention has no speed on a device that the host plays");
}

}  // namespace meshfill
