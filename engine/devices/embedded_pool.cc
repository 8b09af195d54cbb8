#include "engine/devices/embedded_pool.h"

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/devices/cuda_pool.h"
#include "engine/devices/free_memory.h"
#include "engine/speed/pool_profile.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cuda/cuda_device.h"
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
absl::StatusOr<std::vector<CudaDeviceInfo>> Devices(const EngineOptions& options) {
  if (options.dtype != DType::kF32) {
    ASSIGN_OR_RETURN(std::vector<CudaDeviceInfo> devices, ChooseDevices(options.device));
    for (CudaDeviceInfo& device : devices) {
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
  if (options.device != DeviceChoice::kCuda) return std::vector<CudaDeviceInfo>();
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
  std::shared_ptr<Device> cpu;
  const auto device_for = [&](const ModelShape& shape) -> absl::StatusOr<Device*> {
    cpu = MakeCpuDevice(shape.dtype, threads, options.ranks);
    return cpu.get();
  };
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(options.model_path, options.dtype, device_for));
  const ModelShape& shape = model->shape();
  ASSIGN_OR_RETURN(EmbeddedPoolCapacity capacity, CpuPoolCapacity(options, shape));
  EmbeddedPool pool;
  pool.capacity = capacity;
  pool.peak_flops = options.peak_flops > 0 ? options.peak_flops
                                           : MeasurePeakFlops(shape.dtype, threads, kPeakMeasureSeconds);
  pool.devices.assign(options.ranks, std::move(cpu));
  pool.models.assign(options.ranks, std::move(model));
  return pool;
}

absl::StatusOr<EmbeddedPoolCapacity> CudaPoolCapacity(const EngineOptions& options, const ModelShape& shape,
                                                      const std::vector<CudaDeviceInfo>& gpus,
                                                      std::span<const std::shared_ptr<Device>> of_rank) {
  const auto used = std::span(gpus).first(UsedGpus(gpus, options.ranks));
  ASSIGN_OR_RETURN(PoolSpeed speed,
                   KeptPoolSpeed(options.speed_profile_path, CudaPoolKey(shape, used, options.ranks),
                                 [&] { return MeasureCudaPoolSpeed(shape, of_rank); }));
  ASSIGN_OR_RETURN(int64_t budget, options.memory_budget_bytes > 0
                                       ? absl::StatusOr<int64_t>(options.memory_budget_bytes)
                                       : CudaPoolBudgetBytes(gpus, options.ranks));
  return EmbeddedPoolCapacity{.speed = speed, .memory_budget_bytes = budget, .one_memory = used.size() == 1};
}

// By rank; each made once, by `make`.
absl::StatusOr<std::vector<std::shared_ptr<Device>>> DevicesByRank(
    const std::vector<CudaDeviceInfo>& gpus, int ranks,
    const std::function<absl::StatusOr<std::shared_ptr<Device>>(const CudaDeviceInfo&)>& make) {
  std::vector<std::shared_ptr<Device>> of_rank;
  for (int rank = 0; rank < ranks; ++rank) {
    const CudaDeviceInfo& gpu = GpuOf(gpus, rank, ranks);
    if (rank > 0 && gpu.ordinal == GpuOf(gpus, rank - 1, ranks).ordinal) {
      of_rank.push_back(of_rank.back());
      continue;
    }
    ASSIGN_OR_RETURN(std::shared_ptr<Device> device, make(gpu));
    of_rank.push_back(std::move(device));
  }
  return of_rank;
}

// A device keeps the memory of streams that are gone for the next ones. One for each rank, now, so that the
// budget knows of it and no prompt waits for it.
absl::Status MakeFirstStreams(std::span<const std::shared_ptr<Device>> of_rank) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (const std::shared_ptr<Device>& device : of_rank) {
    ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->NewStream(nullptr));
    streams.push_back(std::move(stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<EmbeddedPool> LoadCudaPool(const EngineOptions& options,
                                          const std::vector<CudaDeviceInfo>& gpus) {
  EmbeddedPool pool;
  std::map<int, std::shared_ptr<const Model>> on_gpu;  // by ordinal
  const auto load = [&](const CudaDeviceInfo& gpu) -> absl::StatusOr<std::shared_ptr<Device>> {
    std::shared_ptr<Device> device;
    const auto device_for = [&](const ModelShape& shape) -> absl::StatusOr<Device*> {
      ASSIGN_OR_RETURN(device, MakeCudaDeviceFor(shape, gpu));
      return device.get();
    };
    ASSIGN_OR_RETURN(on_gpu[gpu.ordinal], Model::Load(options.model_path, DType::kBf16, device_for));
    return device;
  };
  ASSIGN_OR_RETURN(pool.devices, DevicesByRank(gpus, options.ranks, load));
  for (int rank = 0; rank < options.ranks; ++rank) {
    pool.gpus.push_back(GpuOf(gpus, rank, options.ranks));
    pool.models.push_back(on_gpu.at(pool.gpus.back().ordinal));
  }
  const ModelShape& shape = pool.models.front()->shape();
  RETURN_IF_ERROR(LoadCudaKernels(shape, pool.devices));
  RETURN_IF_ERROR(MakeFirstStreams(pool.devices));
  ASSIGN_OR_RETURN(pool.capacity, CudaPoolCapacity(options, shape, gpus, pool.devices));
  ASSIGN_OR_RETURN(pool.peak_flops, options.peak_flops > 0
                                        ? absl::StatusOr<double>(options.peak_flops)
                                        : CudaPoolPeakFlops(gpus, options.ranks, *pool.devices.front()));
  return pool;
}

}  // namespace

absl::StatusOr<EmbeddedPool> LoadEmbeddedPool(const EngineOptions& options) {
  ASSIGN_OR_RETURN(std::vector<CudaDeviceInfo> devices, Devices(options));
  return devices.empty() ? LoadCpuPool(options) : LoadCudaPool(options, devices);
}

absl::StatusOr<EmbeddedPoolCapacity> CapacityWithoutWeights(const EngineOptions& options,
                                                            const ModelShape& shape) {
  ASSIGN_OR_RETURN(std::vector<CudaDeviceInfo> devices, Devices(options));
  if (devices.empty()) return CpuPoolCapacity(options, shape);
  ASSIGN_OR_RETURN(std::vector<std::shared_ptr<Device>> of_rank,
                   DevicesByRank(devices, options.ranks, MakeCudaDevice));
  return CudaPoolCapacity(options, shape, devices, of_rank);
}

}  // namespace meshfill
