// In place of a measurement: the reference's speed is nobody's, and takes long to find out.
#include "engine/devices/cuda_pool.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {

absl::Status LoadCudaKernels(const ModelShape&, std::span<const std::shared_ptr<Device>>) {
  return absl::OkStatus();
}

absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape&,
                                               std::span<const std::shared_ptr<Device>> of_rank) {
  ++FakeCuda::speed_measurements;
  return PoolSpeed{.lm_head_bytes_per_second = 1e12, .slice_tokens = of_rank.front()->grain().slice_tokens};
}

}  // namespace meshfill
