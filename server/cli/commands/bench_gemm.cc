#include "server/cli/commands/bench_gemm.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/devices/device.h"
#include "kernels/cpu/gemm_bench.h"
#include "kernels/cuda/gemm_bench.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

class BenchGemmCommand : public Command {
 public:
  explicit BenchGemmCommand(CLI::App& parent)
      : Command(parent.add_subcommand("gemm",
                                      "A linear layer against the machine's register loop, or on a GPU")) {
    AddDeviceOption(*app_, device_)->description("cpu (default), cuda, or auto");
    AddParsedOption(*app_, "--dtype", options_.dtype, ParseComputeDType, "NAME", "bf16 (default) or f32");
    AddCount(*app_, "--tokens", options_.tokens, "Rows that are multiplied");
    AddCount(*app_, "--in-features", options_.in_features, "Width of the input");
    AddCount(*app_, "--out-features", options_.out_features, "Width of the output");
    AddCount(*app_, "--threads", options_.threads, "CPU threads");
    AddCount(*app_, "--repeats", options_.repeats, "Runs of each; medians are reported");
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ChooseDevices(device_));
    if (!devices.empty()) return RunOnGpu(devices.front());
    ASSIGN_OR_RETURN(GemmBenchResult result, BenchGemm(options_));
    std::fputs(json_ ? Json(result).c_str() : Text(result).c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status RunOnGpu(const CudaDeviceInfo& device) {
    if (options_.dtype != DType::kBf16) {
      return absl::InvalidArgumentError("--dtype f32: a GPU multiplies in bf16 alone; leave it out");
    }
    ASSIGN_OR_RETURN(CudaGemmBenchResult result, BenchCudaGemm({.tokens = options_.tokens,
                                                                .in_features = options_.in_features,
                                                                .out_features = options_.out_features,
                                                                .repeats = options_.repeats},
                                                               device));
    const double peak = CudaPeakFlops(device.name), flops = result.flops_per_second;
    const nlohmann::ordered_json json = {{"target", device.name},
                                         {"dtype", "bf16"},
                                         {"tokens", options_.tokens},
                                         {"in_features", options_.in_features},
                                         {"out_features", options_.out_features},
                                         {"seconds", result.seconds},
                                         {"flops_per_second", flops},
                                         {"peak_flops_per_second", peak}};
    const std::string text = absl::StrFormat(
        "%s, bf16, %s tokens, %s to %s features\n"
        "linear layer    %.1f TFLOP/s (%s), %.1f %% of the data sheet's peak\n",
        device.name, FormatCount(static_cast<double>(options_.tokens)),
        FormatCount(static_cast<double>(options_.in_features)),
        FormatCount(static_cast<double>(options_.out_features)), flops / 1e12, FormatSeconds(result.seconds),
        peak > 0 ? 100 * flops / peak : 0.0);
    std::fputs(json_ ? absl::StrCat(json.dump(), "\n").c_str() : text.c_str(), stdout);
    return absl::OkStatus();
  }

  std::string Json(const GemmBenchResult& result) const {
    const nlohmann::ordered_json json = {{"dtype", DTypeName(options_.dtype)},
                                         {"tokens", options_.tokens},
                                         {"in_features", options_.in_features},
                                         {"out_features", options_.out_features},
                                         {"threads", options_.threads},
                                         {"seconds", result.seconds},
                                         {"flops_per_second", result.flops_per_second},
                                         {"peak_flops_per_second", result.peak_flops_per_second},
                                         {"ratio", result.ratio}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text(const GemmBenchResult& result) const {
    return absl::StrFormat(
        "%s, %s tokens, %s to %s features, %d thread%s\n"
        "linear layer    %.1f GFLOP/s (%s)\n"
        "register loop   %.1f GFLOP/s\n"
        "ratio           %.3f\n",
        DTypeName(options_.dtype), FormatCount(static_cast<double>(options_.tokens)),
        FormatCount(static_cast<double>(options_.in_features)),
        FormatCount(static_cast<double>(options_.out_features)), options_.threads,
        options_.threads == 1 ? "" : "s", result.flops_per_second / 1e9, FormatSeconds(result.seconds),
        result.peak_flops_per_second / 1e9, result.ratio);
  }

  DeviceChoice device_ = DeviceChoice::kCpu;
  GemmBenchOptions options_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchGemmCommand(CLI::App& parent) {
  return std::make_unique<BenchGemmCommand>(parent);
}

}  // namespace meshfill
