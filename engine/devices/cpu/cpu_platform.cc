#include "engine/devices/cpu/cpu_platform.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/comm/gloo/gloo_data_plane.h"
#include "engine/devices/container_limits.h"
#include "engine/devices/free_memory.h"
#include "engine/model/layer_shape.h"
#include "engine/speed/pool_profile.h"
#include "engine/speed/pool_speed.h"
#include "kernels/cpu/bench/attention_bench.h"
#include "kernels/cpu/bench/gemm_bench.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/gemm.h"
#include "kernels/peak.h"

namespace meshfill {
namespace {

constexpr double kPeakMeasureSeconds = 0.2;

// The processor as the system names it.
std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  std::string name = " unknown processor";
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) name = line.substr(line.find(':') + 1);
  }
  return name;
}

class CpuDevices final : public PoolDevices {
 public:
  explicit CpuDevices(const DeviceRequest& request)
      : ranks_(request.ranks),
        dtype_(request.dtype),
        threads_(request.threads > 0 ? request.threads
                                     : DefaultThreads(static_cast<int>(std::thread::hardware_concurrency()),
                                                      ReadContainerLimits())) {}

  int count() const override { return 1; }
  std::string DeviceName(int) const override { return "cpu"; }
  std::optional<DType> dtype() const override { return dtype_; }
  bool in_host_memory() const override { return true; }

  absl::Status CheckModel(const ModelShape&) const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<Device>> Make(int, DType dtype) const override {
    return MakeCpuDevice(dtype, threads_, ranks_);
  }
  DType WeightDType(DType dtype) const override { return CpuWeightDType(dtype); }
  int64_t WidenedBytes(const ModelShape& shape) const override {
    return std::min(MostWidenedBytes(shape, WeightDType(shape.dtype)), CpuGemm::kWidenedBytes);
  }
  absl::StatusOr<int64_t> FreeBytes() const override { return FreeMemoryBytes(); }
  absl::Status WarmUp(const ModelShape&, DevicesByRank) const override { return absl::OkStatus(); }

  std::string SpeedKey(const ModelShape& shape, DevicesByRank devices) const override {
    return PoolKey(absl::StrCat("CPU", ProcessorName(), ", ", sysconf(_SC_NPROCESSORS_ONLN), " cores, ",
                                devices.front()->name()),
                   shape, absl::StrCat(threads_, " threads, ", ranks_, " ranks"));
  }
  absl::StatusOr<PoolSpeed> MeasureSpeed(const ModelShape& shape, DevicesByRank devices) const override {
    return MeasurePoolSpeed(shape, *devices.front(), std::min(threads_, ranks_), ranks_);
  }
  absl::StatusOr<double> PeakFlops(DevicesByRank devices) const override {
    return MeasurePeakFlops(devices.front()->dtype(), threads_, kPeakMeasureSeconds);
  }
  absl::StatusOr<int64_t> BudgetBytes(int64_t weights_to_come) const override {
    return DefaultMemoryBudgetBytes(weights_to_come);
  }

  absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions& options) const override {
    return meshfill::BenchAttention(options);
  }
  absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions& options) const override {
    return meshfill::BenchGemm(options);
  }

  absl::StatusOr<std::unique_ptr<DataPlane>> MakeDataPlane(const DataPlaneOptions& options) const override {
    return MakeGlooDataPlane(options);
  }

 private:
  const int ranks_;
  const std::optional<DType> dtype_;
  const int threads_;
};

class CpuPlatform final : public Platform {
 public:
  std::string name() const override { return "cpu"; }
  absl::StatusOr<std::unique_ptr<PoolDevices>> Find(const DeviceRequest& request) const override {
    if (!request.devices.empty()) {
      return absl::InvalidArgumentError(
          "pool.worker.devices names GPUs, and the ranks are to compute on the CPU; leave it out, or choose "
          "the device cuda");
    }
    return std::make_unique<CpuDevices>(request);
  }
};

}  // namespace

std::unique_ptr<Platform> MakeCpuPlatform() { return std::make_unique<CpuPlatform>(); }

}  // namespace meshfill
