#include "engine/devices/device.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace meshfill {

absl::StatusOr<DeviceChoice> ParseDevice(std::string_view name) {
  if (name == "auto") return DeviceChoice::kAuto;
  if (name == "cpu") return DeviceChoice::kCpu;
  if (name == "cuda") return DeviceChoice::kCuda;
  return absl::InvalidArgumentError(
      absl::StrCat("'", std::string(name), "' is no device; choose one of auto, cpu, cuda"));
}

absl::StatusOr<std::vector<CudaDeviceInfo>> ChooseDevices(DeviceChoice choice) {
  if (choice == DeviceChoice::kCpu) return std::vector<CudaDeviceInfo>();
  absl::StatusOr<std::vector<CudaDeviceInfo>> devices = FindCudaDevices();
  if (devices.ok()) return devices;
  if (choice == DeviceChoice::kAuto) return std::vector<CudaDeviceInfo>();
  return absl::InvalidArgumentError(
      absl::StrCat("device cuda: ", devices.status().message(), ", or choose the device cpu"));
}

}  // namespace meshfill
