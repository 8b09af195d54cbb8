// In place of a measurement: the reference's speed is nobody's, and takes long to find out.
#include "engine/devices/cuda/cuda_pool_speed.h"
#include "kernels/cuda/attention_bench.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {

absl::Status LoadCudaKernels(const ModelShape&, DevicesByRank) { return absl::OkStatus(); }

absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape&, DevicesByRank devices) {
  ++FakeCuda::speed_measurements;
  return PoolSpeed{.lm_head_bytes_per_second = 1e12, .slice_tokens = devices.front()->grain().slice_tokens};
}

absl::StatusOr<CudaAttentionBenchResult> BenchCudaAttention(const CudaAttentionBenchOptions&,
                                                            const CudaDeviceTraits&) {
  return absl::UnimplementedError("attention has no speed on a device that the host plays");
}

}  // namespace meshfill
