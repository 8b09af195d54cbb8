#include "server/cli/bench/bench_gemm.h"

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

class BenchGemmCommand : public Command {
 public:
  explicit BenchGemmCommand(CLI::App& parent)
      : Command(parent.add_subcommand("gemm",
                                      "A linear layer against the machine's register loop, or on a GPU")) {
    AddDeviceOption(*app_, device_);
    AddParsedOption(*app_, "--dtype", options_.dtype, ParseComputeDType, "NAME", "bf16 (default) or f32");
    AddCount(*app_, "--tokens", options_.tokens, "Rows that are multiplied");
    AddCount(*app_, "--in-features", options_.in_features, "Width of the input");
    AddCount(*app_, "--out-features", options_.out_features, "Width of the output");
    AddCount(*app_, "--threads", options_.threads, "CPU threads");
    AddCount(*app_, "--repeats", options_.repeats, "Runs of each; medians are reported");
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(const std::unique_ptr<PoolDevices> devices,
                     FindDevices(device_, {.dtype = options_.dtype}));
    ASSIGN_OR_RETURN(const KernelBenchResult result, devices->BenchGemm(options_));
    const nlohmann::ordered_json json = {{"dtype", DTypeName(options_.dtype)},
                                         {"tokens", options_.tokens},
                                         {"in_features", options_.in_features},
                                         {"out_features", options_.out_features}};
    const std::string text = absl::StrFormat("%s, %s tokens, %s to %s features", DTypeName(options_.dtype),
                                             FormatCount(static_cast<double>(options_.tokens)),
                                             FormatCount(static_cast<double>(options_.in_features)),
                                             FormatCount(static_cast<double>(options_.out_features)));
    const int threads = options_.threads;
    std::fputs(json_ ? KernelBenchJson(result, json, threads).c_str()
                     : KernelBenchText(result, "linear layer", text, threads).c_str(),
               stdout);
    return absl::OkStatus();
  }

 private:
  std::string device_ = "cpu";
  GemmBenchOptions options_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchGemmCommand(CLI::App& parent) {
  return std::make_unique<BenchGemmCommand>(parent);
}

}  // namespace meshfill
