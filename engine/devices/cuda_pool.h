// The parts of an embedded pool on GPUs (embedded_pool.h).
#ifndef MESHFILL_ENGINE_DEVICES_CUDA_POOL_H_
#define MESHFILL_ENGINE_DEVICES_CUDA_POOL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "kernels/cuda/device_info.h"
#include "kernels/device.h"

namespace meshfill {

// The number of `gpus` that `ranks` ranks use, and the one that `rank` is on.
int UsedGpus(std::span<const CudaDeviceInfo> gpus, int ranks);
const CudaDeviceInfo& GpuOf(std::span<const CudaDeviceInfo> gpus, int rank, int ranks);

// The device, where it has room for this model's weights. INVALID_ARGUMENT: what CUDA's kernels do not
// compute. RESOURCE_EXHAUSTED: the weights do not fit, with the bytes that they need and that are free.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDeviceFor(const ModelShape& shape, const CudaDeviceInfo& gpu);

// Measures the first device, which its ranks share evenly: one of them keeps it busy. And between the first
// two devices.
absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape& shape,
                                               std::span<const std::shared_ptr<Device>> of_rank);

// Runs each kind of operation once on each device. CUDA loads a kernel when it first runs, and for that may
// wait for the device: which must not be while NCCL's kernels there wait for a peer.
absl::Status LoadCudaKernels(const ModelShape& shape, std::span<const std::shared_ptr<Device>> of_rank);

// The peak of all devices in use: their data sheets' figure, or a large product's where there is none.
absl::StatusOr<double> CudaPoolPeakFlops(std::span<const CudaDeviceInfo> gpus, int ranks, Device& first);

// 85 % of what is free now on the devices in use: the rest is for pieces that do not fit together, and NCCL.
absl::StatusOr<int64_t> CudaPoolBudgetBytes(std::span<const CudaDeviceInfo> gpus, int ranks);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_CUDA_POOL_H_
