#include "tests/engine/devices/toy/toy_platform.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/comm/gloo/gloo_data_plane.h"
#include "engine/speed/pool_profile.h"
#include "tests/engine/devices/toy/toy_device.h"

namespace meshfill {
namespace {

constexpr int kToys = 2;

class Toys final : public PoolDevices {
 public:
  explicit Toys(const DeviceRequest& request) : ranks_(request.ranks), dtype_(request.dtype) {}

  int count() const override { return std::min(ranks_, kToys); }
  std::string DeviceName(int device) const override { return absl::StrCat("toy ", device); }
  std::optional<DType> dtype() const override { return dtype_; }
  bool in_host_memory() const override { return true; }

  absl::Status CheckModel(const ModelShape&) const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<Device>> Make(int, DType dtype) const override {
    return std::make_unique<ToyDevice>(dtype);
  }
  DType WeightDType(DType) const override { return DType::kF32; }
  int64_t WidenedBytes(const ModelShape&) const override { return 0; }
  absl::StatusOr<int64_t> FreeBytes() const override { return 0; }
  absl::Status WarmUp(const ModelShape&, DevicesByRank) const override { return absl::OkStatus(); }

  std::string SpeedKey(const ModelShape& shape, DevicesByRank devices) const override {
    return PoolKey(devices.front()->name(), shape, absl::StrCat(ranks_, " ranks"));
  }
  // Plain loops take long to measure.
  absl::StatusOr<PoolSpeed> MeasureSpeed(const ModelShape&, DevicesByRank devices) const override {
    return PoolSpeed{.gemm_flops_per_second = 1e8,
                     .attention_flops_per_second = 1e8,
                     .merge_bytes_per_second = 1e9,
                     .lm_head_bytes_per_second = 1e9,
                     .slice_tokens = devices.front()->grain().slice_tokens};
  }
  absl::StatusOr<double> PeakFlops(DevicesByRank) const override { return 1e9 * count(); }
  absl::StatusOr<int64_t> BudgetBytes(int64_t) const override { return int64_t{count()} << 28; }

  absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions&) const override {
    return absl::UnimplementedError("device toy: nobody measures it");
  }
  absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions&) const override {
    return absl::UnimplementedError("device toy: nobody measures it");
  }

  absl::StatusOr<std::unique_ptr<DataPlane>> MakeDataPlane(const DataPlaneOptions& options) const override {
    return MakeGlooDataPlane(options);
  }

 private:
  const int ranks_;
  const std::optional<DType> dtype_;
};

class ToyPlatform final : public Platform {
 public:
  std::string name() const override { return "toy"; }
  absl::StatusOr<std::unique_ptr<PoolDevices>> Find(const DeviceRequest& request) const override {
    return std::make_unique<Toys>(request);
  }
};

}  // namespace

std::unique_ptr<Platform> MakeToyPlatform() { return std::make_unique<ToyPlatform>(); }

}  // namespace meshfill
