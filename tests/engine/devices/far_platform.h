// The CPU as a device whose memory is not the host's: what the engine does for such devices, in tests that
// need none.
#ifndef MESHFILL_TESTS_ENGINE_DEVICES_FAR_PLATFORM_H_
#define MESHFILL_TESTS_ENGINE_DEVICES_FAR_PLATFORM_H_

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/devices/cpu/cpu_platform.h"
#include "engine/devices/platform.h"
#include "engine/platforms.h"
#include "kernels/return_if_error.h"

namespace meshfill {

class FarDevices final : public PoolDevices {
 public:
  FarDevices(std::unique_ptr<PoolDevices> cpus, int count) : cpus_(std::move(cpus)), count_(count) {}

  int count() const override { return count_; }
  std::string DeviceName(int device) const override { return absl::StrCat("far ", device); }
  std::optional<DType> dtype() const override { return cpus_->dtype(); }
  bool in_host_memory() const override { return false; }

  absl::Status CheckModel(const ModelShape& shape) const override { return cpus_->CheckModel(shape); }
  absl::StatusOr<std::unique_ptr<Device>> Make(int /*device*/, DType dtype) const override {
    return cpus_->Make(0, dtype);
  }
  DType WeightDType(DType dtype) const override { return cpus_->WeightDType(dtype); }
  int64_t WidenedBytes(const ModelShape& shape) const override { return cpus_->WidenedBytes(shape); }
  absl::StatusOr<int64_t> FreeBytes() const override { return cpus_->FreeBytes(); }
  absl::Status WarmUp(const ModelShape& shape, DevicesByRank devices) const override {
    return cpus_->WarmUp(shape, devices);
  }
  std::string SpeedKey(const ModelShape& shape, DevicesByRank devices) const override {
    return absl::StrCat("far ", cpus_->SpeedKey(shape, devices));
  }
  absl::StatusOr<PoolSpeed> MeasureSpeed(const ModelShape& shape, DevicesByRank devices) const override {
    return cpus_->MeasureSpeed(shape, devices);
  }
  absl::StatusOr<double> PeakFlops(DevicesByRank devices) const override { return cpus_->PeakFlops(devices); }
  absl::StatusOr<int64_t> BudgetBytes(int64_t weights_to_come) const override {
    return cpus_->BudgetBytes(weights_to_come);
  }
  absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions& options) const override {
    return cpus_->BenchAttention(options);
  }
  absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions& options) const override {
    return cpus_->BenchGemm(options);
  }
  absl::StatusOr<std::unique_ptr<DataPlane>> MakeDataPlane(const DataPlaneOptions& options) const override {
    return cpus_->MakeDataPlane(options);
  }

 private:
  const std::unique_ptr<PoolDevices> cpus_;
  const int count_;
};

class FarPlatform final : public Platform {
 public:
  FarPlatform(std::string name, int devices) : name_(std::move(name)), devices_(devices) {}
  std::string name() const override { return name_; }
  absl::StatusOr<std::unique_ptr<PoolDevices>> Find(const DeviceRequest& request) const override {
    ASSIGN_OR_RETURN(std::unique_ptr<PoolDevices> cpus, MakeCpuPlatform()->Find(request));
    return std::make_unique<FarDevices>(std::move(cpus), std::min(devices_, request.ranks));
  }

 private:
  const std::string name_;
  const int devices_;
};

// "far" is one device, "far_pair" two. Once for each process, whoever calls it.
inline void RegisterFarPlatform() {
  [[maybe_unused]] static const bool registered = [] {
    RegisterPlatform(std::make_unique<FarPlatform>("far", 1));
    RegisterPlatform(std::make_unique<FarPlatform>("far_pair", 2));
    return true;
  }();
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_DEVICES_FAR_PLATFORM_H_
