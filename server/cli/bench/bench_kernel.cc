#include "server/cli/bench/bench_kernel.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/cli/progress_bar.h"

namespace meshfill {
namespace {

// A device without a register loop beside it is measured against its data sheet.
bool HasRegisterLoop(const KernelBenchResult& result) { return result.ratio > 0; }

}  // namespace

std::string KernelBenchJson(const KernelBenchResult& result, const nlohmann::ordered_json& inputs,
                            int threads) {
  nlohmann::ordered_json json = {{"target", result.target}};
  json.update(inputs);
  if (HasRegisterLoop(result)) json["threads"] = threads;
  json["seconds"] = result.seconds;
  json["flops_per_second"] = result.flops_per_second;
  json["peak_flops_per_second"] = result.peak_flops_per_second;
  if (HasRegisterLoop(result)) json["ratio"] = result.ratio;
  return absl::StrCat(json.dump(), "\n");
}

std::string KernelBenchText(const KernelBenchResult& result, const std::string& kernel,
                            const std::string& inputs, int threads) {
  const double flops = result.flops_per_second, peak = result.peak_flops_per_second;
  const std::string seconds = FormatSeconds(result.seconds);
  if (!HasRegisterLoop(result)) {
    return absl::StrFormat("%s, %s\n%-15s %.1f TFLOP/s (%s), %.1f %% of the data sheet's peak\n",
                           result.target, inputs, kernel, flops / 1e12, seconds,
                           peak > 0 ? 100 * flops / peak : 0.0);
  }
  return absl::StrFormat(
      "%s, %s, %d thread%s\n%-15s %.1f GFLOP/s (%s)\n"
      "register loop   %.1f GFLOP/s\n"
      "ratio           %.3f\n",
      result.target, inputs, threads, threads == 1 ? "" : "s", kernel, flops / 1e9, seconds, peak / 1e9,
      result.ratio);
}

}  // namespace meshfill
