#include "engine/devices/embedded_pool.h"

#include <algorithm>
#include <map>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/devices/cuda_pool.h"
#include "engine/devices/free_memory.h"
#include "engine/speed/pool_profile.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/peak.h"

namespace meshfill {
namespace {

constexpr double kPeakMeasureSeconds = 0.2;

int Threads(const EngineOptions& options) {
  return options.threads > 0 ? options.threads
                             : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Where f32 is asked for, auto means the CPU.
absl::StatusOr<std::vector<CudaDevice>> Devices(const EngineOptions& options) {
  if (options.dtype != DType::kF32) {
    absl::StatusOr<std::vector<CudaDevice>> devices = ChooseDevices(options.device);
    if (!devices.ok()) return devices;
    for (CudaDevice& device : *devices) {
      if (options.communication_multiprocessors >= device.traits.multiprocessors) {
        return absl::InvalidArgumentError(absl::StrCat(
            "GPU ", device.ordinal, " (", device.name, ") has ", device.traits.multiprocessors,
            " multiprocessors, and attention is to leave ", options.communication_multiprocessors,
            " of them to NCCL; lower pool.worker.attention_sm_margin"));
      }
      device.traits.margin_multiprocessors = options.communication_multiprocessors;
    }
    return devices;
  }
  if (options.device != DeviceChoice::kCuda) return std::vector<CudaDevice>();
  return absl::InvalidArgumentError(
      "device cuda: it computes in bf16, not in f32; leave the dtype out, or choose the "
      "device cpu");
}

absl::StatusOr<EmbeddedPoolCapacity> CpuPoolCapacity(const EngineOptions& options, const ModelShape& shape) {
  absl::StatusOr<PoolSpeed> speed =
      CpuPoolSpeed(shape, Threads(options), options.ranks, options.speed_profile_path);
  if (!speed.ok()) return speed.status();
  const int64_t given = options.memory_budget_bytes;
  return EmbeddedPoolCapacity{.speed = *speed,
                              .memory_budget_bytes = given > 0 ? given : DefaultMemoryBudgetBytes()};
}

absl::StatusOr<EmbeddedPool> LoadCpuPool(const EngineOptions& options) {
  const int threads = Threads(options);
  absl::StatusOr<std::unique_ptr<Model>> model =
      Model::Load(options.model_path, options.dtype,
                  [threads](const ModelShape& shape) { return MakeCpuBackend(shape.dtype, threads); });
  if (!model.ok()) return model.status();
  const ModelShape& shape = (*model)->shape();
  absl::StatusOr<EmbeddedPoolCapacity> capacity = CpuPoolCapacity(options, shape);
  if (!capacity.ok()) return capacity.status();
  EmbeddedPool pool;
  pool.capacity = *capacity;
  pool.peak_flops = options.peak_flops > 0 ? options.peak_flops
                                           : MeasurePeakFlops(shape.dtype, threads, kPeakMeasureSeconds);
  pool.models.assign(options.ranks, *std::move(model));
  for (int rank = 0; rank < options.ranks; ++rank) {
    pool.backends.push_back(MakeCpuBackend(shape.dtype, std::max(1, threads / options.ranks)));
  }
  return pool;
}

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> MakeCudaBackends(const std::vector<CudaDevice>& devices,
                                                                       int ranks) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < ranks; ++rank) {
    absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCudaBackend(CudaDeviceOf(devices, rank, ranks));
    if (!backend.ok()) return backend.status();
    backends.push_back(*std::move(backend));
  }
  return backends;
}

absl::StatusOr<EmbeddedPoolCapacity> CudaPoolCapacity(const EngineOptions& options, const ModelShape& shape,
                                                      const std::vector<CudaDevice>& devices,
                                                      std::span<const std::unique_ptr<Backend>> backends) {
  const auto used = std::span(devices).first(UsedCudaDevices(devices, options.ranks));
  absl::StatusOr<PoolSpeed> speed =
      KeptPoolSpeed(options.speed_profile_path, CudaPoolKey(shape, used, options.ranks),
                    [&] { return MeasureCudaPoolSpeed(shape, devices, backends); });
  if (!speed.ok()) return speed.status();
  absl::StatusOr<int64_t> budget = options.memory_budget_bytes > 0
                                       ? absl::StatusOr<int64_t>(options.memory_budget_bytes)
                                       : CudaPoolBudgetBytes(devices, options.ranks);
  if (!budget.ok()) return budget.status();
  return EmbeddedPoolCapacity{
      .speed = *speed, .memory_budget_bytes = *budget, .one_memory = used.size() == 1};
}

absl::StatusOr<EmbeddedPool> LoadCudaPool(const EngineOptions& options,
                                          const std::vector<CudaDevice>& devices) {
  EmbeddedPool pool;
  std::map<int, std::shared_ptr<const Model>> of_device;
  for (int rank = 0; rank < options.ranks; ++rank) {
    const CudaDevice& device = CudaDeviceOf(devices, rank, options.ranks);
    std::shared_ptr<const Model>& model = of_device[device.ordinal];
    if (model == nullptr) {
      absl::StatusOr<std::unique_ptr<Model>> loaded =
          Model::Load(options.model_path, DType::kBf16,
                      [&device](const ModelShape& shape) { return MakeCudaLoader(device, shape); });
      if (!loaded.ok()) return loaded.status();
      model = *std::move(loaded);
    }
    pool.models.push_back(model);
    pool.devices.push_back(device);
  }
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> backends = MakeCudaBackends(devices, options.ranks);
  if (!backends.ok()) return backends.status();
  pool.backends = *std::move(backends);
  const ModelShape& shape = pool.models.front()->shape();
  if (absl::Status status = LoadCudaKernels(shape, devices, pool.backends); !status.ok()) return status;
  absl::StatusOr<EmbeddedPoolCapacity> capacity = CudaPoolCapacity(options, shape, devices, pool.backends);
  if (!capacity.ok()) return capacity.status();
  pool.capacity = *capacity;
  absl::StatusOr<double> peak_flops = options.peak_flops > 0
                                          ? absl::StatusOr<double>(options.peak_flops)
                                          : CudaPoolPeakFlops(devices, options.ranks, *pool.backends.front());
  if (!peak_flops.ok()) return peak_flops.status();
  pool.peak_flops = *peak_flops;
  return pool;
}

}  // namespace

absl::StatusOr<EmbeddedPool> LoadEmbeddedPool(const EngineOptions& options) {
  absl::StatusOr<std::vector<CudaDevice>> devices = Devices(options);
  if (!devices.ok()) return devices.status();
  return devices->empty() ? LoadCpuPool(options) : LoadCudaPool(options, *devices);
}

absl::StatusOr<EmbeddedPoolCapacity> CapacityWithoutWeights(const EngineOptions& options,
                                                            const ModelShape& shape) {
  absl::StatusOr<std::vector<CudaDevice>> devices = Devices(options);
  if (!devices.ok()) return devices.status();
  if (devices->empty()) return CpuPoolCapacity(options, shape);
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> backends = MakeCudaBackends(*devices, options.ranks);
  if (!backends.ok()) return backends.status();
  return CudaPoolCapacity(options, shape, *devices, *backends);
}

}  // namespace meshfill
