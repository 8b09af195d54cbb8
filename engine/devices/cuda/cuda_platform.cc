#include "engine/devices/cuda/cuda_platform.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/nccl/nccl_data_plane.h"
#include "engine/devices/cuda/cuda_pool_speed.h"
#include "engine/model/layer_shape.h"
#include "engine/speed/pool_profile.h"
#include "kernels/cuda/attention_bench.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/device_info.h"
#include "kernels/cuda/gemm_bench.h"
#include "kernels/gpu_defaults.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "kernels/stream.h"

namespace meshfill {
namespace {

// FLOP/s of a square product.
absl::StatusOr<double> MeasureProduct(Device& device) {
  constexpr int64_t kWidth = 4096;
  constexpr int kRuns = 10;
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device.NewStream(nullptr));
  const std::vector<BFloat16> ones(kWidth * kWidth, BFloat16::FromFloat(0.5f));
  const WeightRows rows{.data = ones.data(), .dtype = DType::kBf16, .rows = kWidth};
  ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> weight, device.PackWeight({&rows, 1}, kWidth));
  ASSIGN_OR_RETURN(BufferRef x, stream->Place(ones.data(), ones.size() * sizeof(BFloat16)));
  ASSIGN_OR_RETURN(BufferRef y, stream->Allocate(ones.size() * sizeof(BFloat16)));
  std::chrono::steady_clock::time_point start;
  for (int run = -1; run < kRuns; ++run) {  // the first picks its algorithm
    RETURN_IF_ERROR(stream->Gemm(
        {.weight = weight.get(), .x = x->data(), .tokens = kWidth, .y = y->data(), .y_dtype = DType::kBf16}));
    if (run >= 0 && run < kRuns - 1) continue;
    RETURN_IF_ERROR(stream->Finish());
    if (run < 0) start = std::chrono::steady_clock::now();
  }
  return kRuns * 2.0 * kWidth * kWidth * kWidth / SecondsSince(start);
}

class CudaDevices final : public PoolDevices {
 public:
  CudaDevices(std::vector<CudaDeviceInfo> gpus, int ranks) : gpus_(std::move(gpus)), ranks_(ranks) {
    if (static_cast<int>(gpus_.size()) > ranks) gpus_.resize(ranks);
  }

  int count() const override { return static_cast<int>(gpus_.size()); }
  std::string DeviceName(int device) const override { return gpus_[device].name; }
  std::optional<DType> dtype() const override { return DType::kBf16; }
  bool in_host_memory() const override { return false; }

  absl::Status CheckModel(const ModelShape& shape) const override {
    if (shape.rotated_dim() % 4 != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("device cuda: ", shape.rotated_dim(),
                       " dimensions of a head are rotated, of which it computes multiples of 4; choose the "
                       "device cpu"));
    }
    if (shape.head_dim % 8 != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("device cuda: head_dim is ", shape.head_dim,
                       ", of which it computes multiples of 8; choose the device cpu"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Device>> Make(int device, DType) const override {
    return MakeCudaDevice(gpus_[device]);
  }

  DType WeightDType(DType) const override { return DType::kBf16; }
  int64_t WidenedBytes(const ModelShape& shape) const override {
    return MostWidenedProductBytes(shape, DType::kBf16);
  }
  absl::StatusOr<int64_t> FreeBytes() const override {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const CudaDeviceInfo& gpu : gpus_) {
      ASSIGN_OR_RETURN(const int64_t free_bytes, FreeCudaMemoryBytes(gpu));
      least = std::min(least, free_bytes);
    }
    return least;
  }

  // A device keeps the memory of streams that are gone for the next ones. One for each rank, now, so that the
  // budget knows of it and no prompt waits for it.
  absl::Status WarmUp(const ModelShape& shape, DevicesByRank devices) const override {
    RETURN_IF_ERROR(LoadCudaKernels(shape, devices));
    std::vector<std::unique_ptr<Stream>> streams;
    for (const std::shared_ptr<Device>& device : devices) {
      ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->NewStream(nullptr));
      streams.push_back(std::move(stream));
    }
    return absl::OkStatus();
  }

  std::string SpeedKey(const ModelShape& shape, DevicesByRank) const override {
    std::string hardware;
    for (const CudaDeviceInfo& gpu : gpus_) {
      const CudaDeviceTraits& traits = gpu.traits;
      absl::StrAppend(&hardware, hardware.empty() ? "CUDA " : " + ", gpu.name, " (", traits.compute_major,
                      ".", traits.compute_minor, ", ", traits.multiprocessors, " less ",
                      traits.margin_multiprocessors, ")");
    }
    return PoolKey(hardware, shape, absl::StrCat(ranks_, " ranks"));
  }

  absl::StatusOr<PoolSpeed> MeasureSpeed(const ModelShape& shape, DevicesByRank devices) const override {
    return MeasureCudaPoolSpeed(shape, devices);
  }

  // The data sheets' figures, or a large product's where there is none.
  absl::StatusOr<double> PeakFlops(DevicesByRank devices) const override {
    double peak = 0;
    for (const CudaDeviceInfo& gpu : gpus_) {
      double flops = CudaPeakFlops(gpu.name);
      if (flops == 0) {
        ASSIGN_OR_RETURN(double measured, MeasureProduct(*devices.front()));
        flops = measured;
      }
      peak += flops;
    }
    return peak;
  }

  absl::StatusOr<int64_t> BudgetBytes(int64_t weights_to_come) const override {
    std::vector<int> ranks_on(gpus_.size());
    for (int rank = 0; rank < ranks_; ++rank) ++ranks_on[DeviceOfRank(rank, ranks_, count())];
    int64_t least_of_rank = std::numeric_limits<int64_t>::max();
    for (int device = 0; device < count(); ++device) {
      ASSIGN_OR_RETURN(const int64_t free_bytes, FreeCudaMemoryBytes(gpus_[device]));
      const int64_t usable_bytes = (free_bytes - weights_to_come / count()) / 100 * kGpuUsablePercent;
      least_of_rank = std::min(least_of_rank, std::max<int64_t>(1, usable_bytes / ranks_on[device]));
    }
    return ranks_ * least_of_rank;
  }

  absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions& options) const override {
    const CudaDeviceInfo& gpu = gpus_.front();
    ASSIGN_OR_RETURN(CudaAttentionBenchResult result, BenchCudaAttention({.dtype = options.dtype,
                                                                          .head_dim = options.head_dim,
                                                                          .q_heads = options.q_heads,
                                                                          .kv_heads = options.kv_heads,
                                                                          .tokens = options.tokens,
                                                                          .repeats = options.repeats},
                                                                         gpu.traits));
    return KernelBenchResult{.target = gpu.name,
                             .seconds = result.seconds,
                             .flops_per_second = result.flops_per_second,
                             .peak_flops_per_second = CudaPeakFlops(gpu.name)};
  }

  absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions& options) const override {
    const CudaDeviceInfo& gpu = gpus_.front();
    ASSIGN_OR_RETURN(CudaGemmBenchResult result, BenchCudaGemm({.tokens = options.tokens,
                                                                .in_features = options.in_features,
                                                                .out_features = options.out_features,
                                                                .repeats = options.repeats},
                                                               gpu));
    return KernelBenchResult{.target = gpu.name,
                             .seconds = result.seconds,
                             .flops_per_second = result.flops_per_second,
                             .peak_flops_per_second = CudaPeakFlops(gpu.name)};
  }

  // NCCL has one rank on a GPU, and no encryption.
  absl::StatusOr<std::unique_ptr<DataPlane>> MakeDataPlane(const DataPlaneOptions& options) const override {
    if (ranks_ > count()) {
      return absl::InvalidArgumentError(absl::StrCat("pool.worker.ranks is ", ranks_,
                                                     ", more than this machine has GPUs; lower it, or "
                                                     "choose the device cpu"));
    }
    if (options.encrypt) {
      return absl::InvalidArgumentError(
          "pool.encrypt is set, and NCCL, which connects ranks on GPUs, cannot encrypt; encrypt the network "
          "(docs/security.md) and leave the key out, or choose the device cpu");
    }
    std::vector<int> ordinals;
    for (const CudaDeviceInfo& gpu : gpus_) ordinals.push_back(gpu.ordinal);
    return MakeNcclDataPlane(options, std::move(ordinals));
  }

 private:
  std::vector<CudaDeviceInfo> gpus_;  // the GPUs in use
  const int ranks_;
};

class CudaPlatform final : public Platform {
 public:
  std::string name() const override { return "cuda"; }

  absl::StatusOr<std::unique_ptr<PoolDevices>> Find(const DeviceRequest& request) const override {
    if (request.dtype == DType::kF32) {
      return absl::FailedPreconditionError("it computes in bf16, not in f32; leave the dtype out");
    }
    absl::StatusOr<std::vector<CudaDeviceInfo>> gpus = FindCudaDevices();
    if (!gpus.ok()) return absl::FailedPreconditionError(gpus.status().message());
    if (!request.devices.empty()) {
      ASSIGN_OR_RETURN(*gpus, Chosen(request, *gpus));
    }
    for (CudaDeviceInfo& gpu : *gpus) {
      if (request.communication_multiprocessors >= gpu.traits.multiprocessors) {
        return absl::InvalidArgumentError(absl::StrCat(
            "GPU ", gpu.ordinal, " (", gpu.name, ") has ", gpu.traits.multiprocessors,
            " multiprocessors, and attention is to leave ", request.communication_multiprocessors,
            " of them to NCCL; lower pool.worker.attention_sm_margin"));
      }
      gpu.traits.margin_multiprocessors = request.communication_multiprocessors;
    }
    return std::make_unique<CudaDevices>(*std::move(gpus), request.ranks);
  }

 private:
  // The GPUs that the request names.
  static absl::StatusOr<std::vector<CudaDeviceInfo>> Chosen(const DeviceRequest& request,
                                                            const std::vector<CudaDeviceInfo>& gpus) {
    if (std::ssize(request.devices) != request.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("pool.worker.devices names ", request.devices.size(),
                                                     " GPUs for ", request.ranks,
                                                     " ranks; name one for each"));
    }
    std::vector<CudaDeviceInfo> chosen;
    for (const int device : request.devices) {
      const auto found = std::find_if(gpus.begin(), gpus.end(),
                                      [device](const CudaDeviceInfo& gpu) { return gpu.ordinal == device; });
      if (found == gpus.end()) {
        std::string usable;
        for (const CudaDeviceInfo& gpu : gpus) {
          absl::StrAppend(&usable, usable.empty() ? "" : ", ", gpu.ordinal, " (", gpu.name, ")");
        }
        return absl::InvalidArgumentError(absl::StrCat("pool.worker.devices names GPU ", device,
                                                       ", which cannot be used here; choose of ", usable));
      }
      chosen.push_back(*found);
    }
    return chosen;
  }
};

}  // namespace

std::unique_ptr<Platform> MakeCudaPlatform() { return std::make_unique<CudaPlatform>(); }

}  // namespace meshfill
