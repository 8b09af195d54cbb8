// Which device a pool computes on: the CPU, or the CUDA devices of this machine.
#ifndef MESHFILL_ENGINE_DEVICES_DEVICE_H_
#define MESHFILL_ENGINE_DEVICES_DEVICE_H_

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_info.h"

namespace meshfill {

enum class DeviceChoice { kAuto, kCpu, kCuda };

absl::StatusOr<DeviceChoice> ParseDevice(std::string_view name);  // INVALID_ARGUMENT with the names there are

// The CUDA devices to compute on; none: the CPU. kAuto takes what is usable. INVALID_ARGUMENT where kCuda was
// asked for and there is none, with the reason and what to do.
absl::StatusOr<std::vector<CudaDeviceInfo>> ChooseDevices(DeviceChoice choice);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_DEVICE_H_
