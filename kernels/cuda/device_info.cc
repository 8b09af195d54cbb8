#include "kernels/cuda/device_info.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/queue.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

std::string Version(int cuda_version) {  // 13020 is 13.2
  return absl::StrCat(cuda_version / 1000, ".", cuda_version % 1000 / 10);
}

// A driver serves every runtime of its own major version and of earlier ones.
absl::Status CheckDriver() {
  int driver = 0, runtime = 0;
  if (cudaError_t error = cudaDriverGetVersion(&driver); error != cudaSuccess) {
    return LaunchStatus("asking for the driver's version", error);
  }
  if (cudaError_t error = cudaRuntimeGetVersion(&runtime); error != cudaSuccess) {
    return LaunchStatus("asking for the runtime's version", error);
  }
  if (driver == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("no NVIDIA driver is loaded on this machine; install one for CUDA ", Version(runtime)));
  }
  if (driver / 1000 < runtime / 1000) {
    return absl::FailedPreconditionError(absl::StrCat("the NVIDIA driver is for CUDA ", Version(driver),
                                                      ", this build needs CUDA ", Version(runtime),
                                                      "; update the driver"));
  }
  return absl::OkStatus();
}

absl::StatusOr<CudaDeviceInfo> ReadDevice(int ordinal) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, ordinal); error != cudaSuccess) {
    return LaunchStatus("reading the device's properties", error);
  }
  ASSIGN_OR_RETURN(CudaDeviceTraits traits, ReadCudaDeviceTraits(ordinal));
  return CudaDeviceInfo{.ordinal = ordinal,
                        .name = properties.name,
                        .traits = traits,
                        .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
}

}  // namespace

absl::StatusOr<std::vector<CudaDeviceInfo>> FindCudaDevices() {
  RETURN_IF_ERROR(CheckDriver());
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return absl::FailedPreconditionError(
        "no NVIDIA GPU is visible; check CUDA_VISIBLE_DEVICES and nvidia-smi");
  }
  if (error != cudaSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("the NVIDIA driver does not start: ", cudaGetErrorString(error), " (",
                     cudaGetErrorName(error), "); check nvidia-smi"));
  }
  std::vector<CudaDeviceInfo> devices;
  std::string refused;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    ASSIGN_OR_RETURN(CudaDeviceInfo device, ReadDevice(ordinal));
    if (device.traits.compute_major >= 8) {
      devices.push_back(std::move(device));
      continue;
    }
    absl::StrAppend(&refused, refused.empty() ? "" : ", ", device.name, " (", device.traits.compute_major,
                    ".", device.traits.compute_minor, ")");
  }
  if (devices.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no GPU has compute capability 8.0 or later: ", refused, "; use another"));
  }
  return devices;
}

absl::StatusOr<int64_t> FreeCudaMemoryBytes(const CudaDeviceInfo& device) {
  const ScopedCudaDevice scope(device.ordinal);
  size_t free_bytes = 0, total_bytes = 0;
  if (cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes); error != cudaSuccess) {
    return LaunchStatus("asking for free memory", error);
  }
  // What the pool has been given back and keeps is free, too.
  cudaMemPool_t pool;
  uint64_t kept = 0, used = 0;
  if (cudaDeviceGetDefaultMemPool(&pool, device.ordinal) == cudaSuccess &&
      cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &kept) == cudaSuccess &&
      cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used) == cudaSuccess && kept > used) {
    free_bytes += kept - used;
  }
  return static_cast<int64_t>(free_bytes);
}

}  // namespace meshfill
