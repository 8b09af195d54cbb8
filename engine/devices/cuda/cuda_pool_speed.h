// What a pool of CUDA devices measures once it has its weights. Tests on GPUs that the host plays replace it.
#ifndef MESHFILL_ENGINE_DEVICES_CUDA_CUDA_POOL_SPEED_H_
#define MESHFILL_ENGINE_DEVICES_CUDA_CUDA_POOL_SPEED_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/devices/platform.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"

namespace meshfill {

// Measures the first device, which its ranks share evenly: one of them keeps it busy. And between the first
// two devices.
absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape& shape, DevicesByRank devices);

// Runs each kind of operation once on each device. CUDA loads a kernel when it first runs, and for that may
// wait for the device: which must not be while NCCL's kernels there wait for a peer.
absl::Status LoadCudaKernels(const ModelShape& shape, DevicesByRank devices);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_CUDA_CUDA_POOL_SPEED_H_
