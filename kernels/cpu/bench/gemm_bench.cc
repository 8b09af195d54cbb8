#include "kernels/cpu/bench/gemm_bench.h"

#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/bench/bench_sample.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/return_if_error.h"
#include "kernels/stream.h"

namespace meshfill {
namespace {

absl::Status CheckOptions(const GemmBenchOptions& options) {
  if (options.dtype == DType::kF16) {
    return absl::InvalidArgumentError("bench gemm: dtype is f16; use bf16 or f32");
  }
  const struct {
    const char* name;
    int64_t value;
  } counts[] = {{"tokens", options.tokens},
                {"in_features", options.in_features},
                {"out_features", options.out_features},
                {"threads", options.threads},
                {"repeats", options.repeats}};
  for (const auto& [name, value] : counts) {
    if (value < 1)
      return absl::InvalidArgumentError(
          absl::StrCat("bench gemm: ", name, " is ", value, "; use at least 1"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::mt19937 random(1);
  const std::vector<char> x = RandomTensor(options.tokens * options.in_features, options.dtype, random);
  const std::vector<char> w = RandomTensor(options.out_features * options.in_features, options.dtype, random);
  std::vector<char> y(options.tokens * options.out_features * DTypeBytes(options.dtype));
  const std::unique_ptr<Device> device = MakeCpuDevice(options.dtype, options.threads);
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->NewStream(nullptr));
  const WeightRows rows{.data = w.data(), .dtype = options.dtype, .rows = options.out_features};
  ASSIGN_OR_RETURN(const auto weight, device->PackWeight({&rows, 1}, options.in_features));
  const GemmArgs args{.weight = weight.get(),
                      .x = x.data(),
                      .tokens = options.tokens,
                      .y = y.data(),
                      .y_dtype = options.dtype};
  const double flops = 2.0 * static_cast<double>(options.tokens) * static_cast<double>(options.in_features) *
                       static_cast<double>(options.out_features);

  RETURN_IF_ERROR(stream->Gemm(args));  // builds its primitives
  const std::string target = SupportedAttentionTargets().front();
  return MeasureBesideRegisterLoop(target, options.dtype, options.threads, options.repeats, flops,
                                   [&] { return stream->Gemm(args); });
}

}  // namespace meshfill
