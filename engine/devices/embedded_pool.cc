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
#include "kernels/return_if_error.h"

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
    ASSIGN_OR_RETURN(std::vector<CudaDevice> devices, ChooseDevices(options.device));
    for (CudaDevice& device : devices) {
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
  ASSIGN_OR_RETURN(PoolSpeed speed,
                   CpuPoolSpeed(shape, Threads(options), options.ranks, options.speed_profile_path));
  const int64_t given = options.memory_budget_bytes;
  return EmbeddedPoolCapacity{.speed = speed,
                              .memory_budget_bytes = given > 0 ? given : DefaultMemoryBudgetBytes()};
}

absl::StatusOr<EmbeddedPool> LoadCpuPool(const EngineOptions& options) {
  const int threads = Threads(options);
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model,
                   Model::Load(options.model_path, options.dtype, [threads](const ModelShape& shape) {
                     return MakeCpuBackend(shape.dtype, threads);
                   }));
  const ModelShape& shape = model->shape();
  ASSIGN_OR_RETURN(EmbeddedPoolCapacity capacity, CpuPoolCapacity(options, shape));
  EmbeddedPool pool;
  pool.capacity = capacity;
  pool.peak_flops = options.peak_flops > 0 ? options.peak_flops
                                           : MeasurePeakFlops(shape.dtype, threads, kPeakMeasureSeconds);
  pool.models.assign(options.ranks, std::move(model));
  for (int rank = 0; rank < options.ranks; ++rank) {
    pool.backends.push_back(MakeCpuBackend(shape.dtype, std::max(1, threads / options.ranks)));
  }
  return pool;
}

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> MakeCudaBackends(const std::vector<CudaDevice>& devices,
                                                                       int ranks) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < ranks; ++rank) {
    ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, MakeCudaBackend(CudaDeviceOf(devices, rank, ranks)));
    backends.push_back(std::move(backend));
  }
  return backends;
}

absl::StatusOr<EmbeddedPoolCapacity> CudaPoolCapacity(const EngineOptions& options, const ModelShape& shape,
                                                      const std::vector<CudaDevice>& devices,
                                                      std::span<const std::unique_ptr<Backend>> backends) {
  const auto used = std::span(devices).first(UsedCudaDevices(devices, options.ranks));
  ASSIGN_OR_RETURN(PoolSpeed speed,
                   KeptPoolSpeed(options.speed_profile_path, CudaPoolKey(shape, used, options.ranks),
                                 [&] { return MeasureCudaPoolSpeed(shape, devices, backends); }));
  ASSIGN_OR_RETURN(int64_t budget, options.memory_budget_bytes > 0
                                       ? absl::StatusOr<int64_t>(options.memory_budget_bytes)
                                       : CudaPoolBudgetBytes(devices, options.ranks));
  return EmbeddedPoolCapacity{.speed = speed, .memory_budget_bytes = budget, .one_memory = used.size() == 1};
}

absl::StatusOr<EmbeddedPool> LoadCudaPool(const EngineOptions& options,
                                          const std::vector<CudaDevice>& devices) {
  EmbeddedPool pool;
  std::map<int, std::shared_ptr<const Model>> of_device;
  for (int rank = 0; rank < options.ranks; ++rank) {
    const CudaDevice& device = CudaDeviceOf(devices, rank, options.ranks);
    std::shared_ptr<const Model>& model = of_device[device.ordinal];
    if (model == nullptr) {
      ASSIGN_OR_RETURN(std::unique_ptr<Model> loaded,
                       Model::Load(options.model_path, DType::kBf16, [&device](const ModelShape& shape) {
                         return MakeCudaLoader(device, shape);
                       }));
      model = std::move(loaded);
    }
    pool.models.push_back(model);
    pool.devices.push_back(device);
  }
  ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Backend>> backends, MakeCudaBackends(devices, options.ranks));
  pool.backends = std::move(backends);
  const ModelShape& shape = pool.models.front()->shape();
  RETURN_IF_ERROR(LoadCudaKernels(shape, devices, pool.backends));
  ASSIGN_OR_RETURN(EmbeddedPoolCapacity capacity, CudaPoolCapacity(options, shape, devices, pool.backends));
  pool.capacity = capacity;
  ASSIGN_OR_RETURN(double peak_flops, options.peak_flops > 0 ? absl::StatusOr<double>(options.peak_flops)
                                                             : CudaPoolPeakFlops(devices, options.ranks,
                                                                                 *pool.backends.front()));
  pool.peak_flops = peak_flops;
  return pool;
}

}  // namespace

absl::StatusOr<EmbeddedPool> LoadEmbeddedPool(const EngineOptions& options) {
  ASSIGN_OR_RETURN(std::vector<CudaDevice> devices, Devices(options));
  return devices.empty() ? LoadCpuPool(options) : LoadCudaPool(options, devices);
}

absl::StatusOr<EmbeddedPoolCapacity> CapacityWithoutWeights(const EngineOptions& options,
                                                            const ModelShape& shape) {
  ASSIGN_OR_RETURN(std::vector<CudaDevice> devices, Devices(options));
  if (devices.empty()) return CpuPoolCapacity(options, shape);
  ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Backend>> backends, MakeCudaBackends(devices, options.ranks));
  return CudaPoolCapacity(options, shape, devices, backends);
}

}  // namespace meshfill
