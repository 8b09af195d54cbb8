#include "server/cli/commands/bench_attention.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/devices/device.h"
#include "kernels/cpu/attention_bench.h"
#include "kernels/cuda/attention_bench.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

class BenchAttentionCommand : public Command {
 public:
  explicit BenchAttentionCommand(CLI::App& parent)
      : Command(parent.add_subcommand("attention",
                                      "Causal attention against the machine's register loop, or on a GPU")) {
    AddDeviceOption(*app_, device_)->description("cpu (default), cuda, or auto");
    AddParsedOption(*app_, "--dtype", options_.dtype, ParseComputeDType, "NAME", "bf16 (default) or f32");
    AddCount(*app_, "--head-dim", options_.head_dim, "Width of a head, 1 to 256");
    AddCount(*app_, "--tokens", options_.tokens, "Queries and keys");
    AddCount(*app_, "--q-heads", options_.q_heads, "Query heads");
    AddCount(*app_, "--kv-heads", options_.kv_heads, "Key and value heads; divides --q-heads");
    AddCount(*app_, "--threads", options_.threads, "CPU threads");
    AddCount(*app_, "--repeats", options_.repeats, "Runs of each; medians are reported");
    app_->add_option("--target", options_.target,
                     "avx512_bf16, avx512, avx2 or portable (default: the widest that this machine has)")
        ->type_name("NAME");
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ChooseDevices(device_));
    if (!devices.empty()) return RunOnGpu(devices.front());
    ASSIGN_OR_RETURN(AttentionBenchResult result, BenchAttention(options_));
    std::fputs(json_ ? Json(result).c_str() : Text(result).c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status RunOnGpu(const CudaDeviceInfo& device) {
    ASSIGN_OR_RETURN(CudaAttentionBenchResult result, BenchCudaAttention({.dtype = options_.dtype,
                                                                          .head_dim = options_.head_dim,
                                                                          .q_heads = options_.q_heads,
                                                                          .kv_heads = options_.kv_heads,
                                                                          .tokens = options_.tokens,
                                                                          .repeats = options_.repeats},
                                                                         device.traits));
    const double peak = CudaPeakFlops(device.name), flops = result.flops_per_second;
    const nlohmann::ordered_json json = {
        {"target", device.name},     {"dtype", DTypeName(options_.dtype)}, {"head_dim", options_.head_dim},
        {"tokens", options_.tokens}, {"q_heads", options_.q_heads},        {"kv_heads", options_.kv_heads},
        {"seconds", result.seconds}, {"flops_per_second", flops},          {"peak_flops_per_second", peak}};
    const std::string text = absl::StrFormat(
        "%s, %s, head_dim %d, %s tokens, %d query and %d KV heads\n"
        "attention       %.1f TFLOP/s (%s), %.1f %% of the data sheet's peak\n",
        device.name, DTypeName(options_.dtype), options_.head_dim,
        FormatCount(static_cast<double>(options_.tokens)), options_.q_heads, options_.kv_heads, flops / 1e12,
        FormatSeconds(result.seconds), peak > 0 ? 100 * flops / peak : 0.0);
    std::fputs(json_ ? absl::StrCat(json.dump(), "\n").c_str() : text.c_str(), stdout);
    return absl::OkStatus();
  }

  std::string Json(const AttentionBenchResult& result) const {
    const nlohmann::ordered_json json = {{"target", result.target},
                                         {"dtype", DTypeName(options_.dtype)},
                                         {"head_dim", options_.head_dim},
                                         {"tokens", options_.tokens},
                                         {"q_heads", options_.q_heads},
                                         {"kv_heads", options_.kv_heads},
                                         {"threads", options_.threads},
                                         {"seconds", result.seconds},
                                         {"flops_per_second", result.flops_per_second},
                                         {"peak_flops_per_second", result.peak_flops_per_second},
                                         {"ratio", result.ratio}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text(const AttentionBenchResult& result) const {
    return absl::StrFormat(
        "%s, %s, head_dim %d, %s tokens, %d query and %d KV heads, %d thread%s\n"
        "attention       %.1f GFLOP/s (%s)\n"
        "register loop   %.1f GFLOP/s\n"
        "ratio           %.3f\n",
        result.target, DTypeName(options_.dtype), options_.head_dim,
        FormatCount(static_cast<double>(options_.tokens)), options_.q_heads, options_.kv_heads,
        options_.threads, options_.threads == 1 ? "" : "s", result.flops_per_second / 1e9,
        FormatSeconds(result.seconds), result.peak_flops_per_second / 1e9, result.ratio);
  }

  DeviceChoice device_ = DeviceChoice::kCpu;
  AttentionBenchOptions options_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchAttentionCommand(CLI::App& parent) {
  return std::make_unique<BenchAttentionCommand>(parent);
}

}  // namespace meshfill
