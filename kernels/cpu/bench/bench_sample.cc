#include "kernels/cpu/bench/bench_sample.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/median.h"
#include "kernels/peak.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// The register loop runs for as long as the kernel did, within these bounds.
constexpr double kMinPeakSeconds = 0.05;
constexpr double kMaxPeakSeconds = 1.0;

}  // namespace

std::vector<char> RandomTensor(int64_t elements, DType dtype, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const size_t bytes = DTypeBytes(dtype);
  std::vector<char> tensor(elements * bytes);
  for (int64_t i = 0; i < elements; ++i) {
    const float value = normal(random);
    const BFloat16 rounded = BFloat16::FromFloat(value);
    std::memcpy(tensor.data() + i * bytes, dtype == DType::kF32 ? static_cast<const void*>(&value) : &rounded,
                bytes);
  }
  return tensor;
}

absl::StatusOr<KernelBenchResult> MeasureBesideRegisterLoop(const std::string& target, DType dtype,
                                                            int threads, int repeats, double flops,
                                                            const std::function<absl::Status()>& kernel) {
  std::vector<double> seconds, speeds, peaks, ratios;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(kernel());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    seconds.push_back(elapsed.count());
    speeds.push_back(flops / elapsed.count());
    const double peak_seconds = std::clamp(elapsed.count(), kMinPeakSeconds, kMaxPeakSeconds);
    peaks.push_back(MeasureRegisterLoop(target, dtype, threads, peak_seconds).average);
    ratios.push_back(speeds.back() / peaks.back());
  }
  return KernelBenchResult{.target = target,
                           .seconds = Median(seconds),
                           .flops_per_second = Median(speeds),
                           .peak_flops_per_second = Median(peaks),
                           .ratio = Median(ratios)};
}

}  // namespace meshfill
