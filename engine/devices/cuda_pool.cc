#include "engine/devices/cuda_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/layer_shape.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/return_if_error.h"
#include "kernels/stream.h"

namespace meshfill {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// In the dtype that a device computes in; the embedding may be twice as wide in the file.
int64_t WeightBytes(const ModelShape& shape) {
  const int64_t layers = shape.layers * LayerMatrixElements(LayerShapeOf(shape));
  return static_cast<int64_t>(sizeof(BFloat16)) * (layers + 2 * shape.vocab * shape.hidden);
}

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

}  // namespace

int UsedGpus(std::span<const CudaDeviceInfo> gpus, int ranks) {
  return std::min(ranks, static_cast<int>(gpus.size()));
}

const CudaDeviceInfo& GpuOf(std::span<const CudaDeviceInfo> gpus, int rank, int ranks) {
  return gpus[rank * UsedGpus(gpus, ranks) / ranks];
}

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDeviceFor(const ModelShape& shape,
                                                          const CudaDeviceInfo& gpu) {
  if (shape.head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("device cuda: head_dim is ", shape.head_dim,
                     ", of which it computes multiples of 8; choose the device cpu"));
  }
  ASSIGN_OR_RETURN(int64_t free_bytes, FreeCudaMemoryBytes(gpu));
  if (WeightBytes(shape) > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "GPU ", gpu.ordinal, " (", gpu.name, "): the weights need ", WeightBytes(shape), " bytes, and ",
        free_bytes, " of ", gpu.memory_bytes, " are free; use a GPU with more memory"));
  }
  return MakeCudaDevice(gpu);
}

absl::StatusOr<double> CudaPoolPeakFlops(std::span<const CudaDeviceInfo> gpus, int ranks, Device& first) {
  double peak = 0;
  for (const CudaDeviceInfo& gpu : gpus.first(UsedGpus(gpus, ranks))) {
    double flops = CudaPeakFlops(gpu.name);
    if (flops == 0) {
      ASSIGN_OR_RETURN(double measured, MeasureProduct(first));
      flops = measured;
    }
    peak += flops;
  }
  return peak;
}

absl::StatusOr<int64_t> CudaPoolBudgetBytes(std::span<const CudaDeviceInfo> gpus, int ranks) {
  int64_t bytes = 0;
  for (const CudaDeviceInfo& gpu : gpus.first(UsedGpus(gpus, ranks))) {
    ASSIGN_OR_RETURN(int64_t free_bytes, FreeCudaMemoryBytes(gpu));
    bytes += free_bytes / 100 * 85;
  }
  return bytes;
}

}  // namespace meshfill
