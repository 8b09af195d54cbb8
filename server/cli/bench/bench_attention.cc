#include "server/cli/bench/bench_attention.h"

#include <cstdio>

#include "absl/strings/str_format.h"
#include "engine/platforms.h"
#include "kernels/kernel_bench.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/bench/bench_kernel.h"
#include "server/cli/commands/flags.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

class BenchAttentionCommand : public Command {
 public:
  explicit BenchAttentionCommand(CLI::App& parent)
      : Command(parent.add_subcommand("attention",
                                      "Causal attention against the machine's register loop, or on a GPU")) {
    AddDeviceOption(*app_, device_);
    AddParsedOption(*app_, "--dtype", options_.dtype, ParseComputeDType, "NAME", "bf16 (default) or f32");
    AddCount(*app_, "--head-dim", options_.head_dim, "Width of a head, 1 to 256");
    AddCount(*app_, "--tokens", options_.tokens, "Queries and keys");
    AddCount(*app_, "--q-heads", options_.q_heads, "Query heads");
    AddCount(*app_, "--kv-heads", options_.kv_heads, "Key and value heads; divides --q-heads");
    AddCount(*app_, "--threads", options_.threads, "CPU threads");
    AddCount(*app_, "--repeats", options_.repeats, "Runs of each; medians are reported");
    app_->add_option(
            "--target", options_.target,
            "amx_bf16, avx512_bf16, avx512, avx2 or portable (default: the widest that this machine has)")
        ->type_name("NAME");
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(const std::unique_ptr<PoolDevices> devices,
                     FindDevices(device_, {.dtype = options_.dtype}));
    ASSIGN_OR_RETURN(const KernelBenchResult result, devices->BenchAttention(options_));
    const nlohmann::ordered_json json = {{"dtype", DTypeName(options_.dtype)},
                                         {"head_dim", options_.head_dim},
                                         {"tokens", options_.tokens},
                                         {"q_heads", options_.q_heads},
                                         {"kv_heads", options_.kv_heads}};
    const std::string text = absl::StrFormat(
        "%s, head_dim %d, %s tokens, %d query and %d KV heads", DTypeName(options_.dtype), options_.head_dim,
        FormatCount(static_cast<double>(options_.tokens)), options_.q_heads, options_.kv_heads);
    const int threads = options_.threads;
    std::fputs(json_ ? KernelBenchJson(result, json, threads).c_str()
                     : KernelBenchText(result, "attention", text, threads).c_str(),
               stdout);
    return absl::OkStatus();
  }

 private:
  std::string device_ = "cpu";
  AttentionBenchOptions options_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchAttentionCommand(CLI::App& parent) {
  return std::make_unique<BenchAttentionCommand>(parent);
}

}  // namespace meshfill
