#include "kernels/cuda/gemm_bench.h"

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/return_if_error.h"
#include "kernels/stream.h"

namespace meshfill {
namespace {

std::vector<BFloat16> RandomElements(int64_t count) {
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<BFloat16> elements(count);
  for (BFloat16& element : elements) element = BFloat16::FromFloat(uniform(random));
  return elements;
}

}  // namespace

absl::StatusOr<CudaGemmBenchResult> BenchCudaGemm(const CudaGemmBenchOptions& options,
                                                  const CudaDeviceInfo& device) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> made, MakeCudaDevice(device));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, made->NewStream(nullptr));
  const std::vector<BFloat16> matrix = RandomElements(options.out_features * options.in_features);
  const std::vector<BFloat16> inputs = RandomElements(options.tokens * options.in_features);
  const WeightRows rows{.data = matrix.data(), .dtype = DType::kBf16, .rows = options.out_features};
  ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> weight, made->PackWeight({&rows, 1}, options.in_features));
  ASSIGN_OR_RETURN(BufferRef x, stream->Place(inputs.data(), inputs.size() * sizeof(BFloat16)));
  ASSIGN_OR_RETURN(BufferRef y, stream->Allocate(options.tokens * options.out_features * sizeof(BFloat16)));

  std::vector<std::shared_ptr<const StreamPoint>> points;
  for (int repeat = -1; repeat < options.repeats; ++repeat) {
    RETURN_IF_ERROR(stream->Gemm({.weight = weight.get(),
                                  .x = x->data(),
                                  .tokens = options.tokens,
                                  .y = y->data(),
                                  .y_dtype = DType::kBf16}));
    ASSIGN_OR_RETURN(points.emplace_back(), stream->Mark());
  }
  RETURN_IF_ERROR(stream->Finish());
  std::vector<double> seconds;
  for (size_t i = 1; i < points.size(); ++i) seconds.push_back(points[i]->SecondsSince(*points[i - 1]));
  std::nth_element(seconds.begin(), seconds.begin() + options.repeats / 2, seconds.end());
  const double median = std::max(1e-9, seconds[options.repeats / 2]);
  const double flops = 2.0 * static_cast<double>(options.tokens) * static_cast<double>(options.in_features) *
                       static_cast<double>(options.out_features);
  return CudaGemmBenchResult{.seconds = median, .flops_per_second = flops / median};
}

}  // namespace meshfill
