#include "server/cli/bench/layer_bench.h"

#include "server/cli/commands/flags.h"

namespace meshfill {

LayerBenchCommand::LayerBenchCommand(CLI::App* app, const MakeModelOptions& model, int64_t tokens)
    : Command(app), model_(model), tokens_(tokens) {
  AddDeviceOption(*app_, engine_.device);
  AddParsedOption(*app_, "--dtype", dtype_, ParseComputeDType, "NAME", "bf16 (default) or f32");
  AddCount(*app_, "--tokens", tokens_, "Tokens in the prompt");
  AddCount(*app_, "--hidden", model_.hidden, "Width of the residual stream");
  AddCount(*app_, "--q-heads", model_.q_heads, "Query heads");
  AddCount(*app_, "--kv-heads", model_.kv_heads, "Key and value heads; divides --q-heads");
  AddCount(*app_, "--head-dim", model_.head_dim, "Width of a head");
  app_->add_option("--threads", engine_.threads, "CPU threads (default: one per core)")
      ->type_name("N")
      ->check(WholeNumber(1));
  AddCount(*app_, "--repeats", repeats_, "Runs of each model, in turn; medians are reported");
  AddJsonFlag(*app_, json_);
}

}  // namespace meshfill
