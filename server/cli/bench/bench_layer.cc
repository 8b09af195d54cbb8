#include "server/cli/bench/bench_layer.h"

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/bench/bench_models.h"
#include "server/cli/bench/layer_bench.h"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

// Seconds of the layer's parts, and of the whole from its first operation to its last.
struct LayerSeconds {
  double whole = 0;
  double attention = 0;
};

LayerSeconds SecondsOf(const Timeline& timeline) {
  double begin = timeline.end_seconds(), end = 0;
  LayerSeconds seconds;
  for (const Span& span : timeline.spans) {
    if (span.layer != 0) continue;
    begin = std::min(begin, span.start_seconds);
    end = std::max(end, span.end_seconds);
    if (span.block.has_value()) seconds.attention += span.seconds();
  }
  seconds.whole = end - begin;
  return seconds;
}

// The shape of an 8B model's layers.
MakeModelOptions EightBillions() {
  return {.hidden = 4096, .intermediate = 14336, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
}

class BenchLayerCommand : public LayerBenchCommand {
 public:
  explicit BenchLayerCommand(CLI::App& parent)
      : LayerBenchCommand(
            parent.add_subcommand("layer", "One whole layer of a model's shape, as one rank runs it"),
            EightBillions(), 2048) {
    AddCount(*app_, "--intermediate", model_.intermediate, "Width of the MLP");
  }

  absl::Status Run() override {
    RETURN_IF_ERROR(Load());
    const std::vector<uint32_t> prompt(static_cast<size_t>(tokens_), 1);
    std::vector<LayerSeconds> runs;
    for (int run = -1; run < repeats_; ++run) {  // the first warms caches, and picks algorithms
      ASSIGN_OR_RETURN(PrefillResult result, RunPrefill(*pool_, {prompt, {.keep_timeline = true}}));
      if (run >= 0) runs.push_back(SecondsOf(*result.timeline));
    }
    const auto middle = runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2);
    std::nth_element(runs.begin(), middle, runs.end(),
                     [](const LayerSeconds& a, const LayerSeconds& b) { return a.whole < b.whole; });
    std::fputs(json_ ? Json(*middle).c_str() : Text(*middle).c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status Load() {
    MakeModelOptions options = model_;
    options.layers = 1;
    options.vocab = 64;  // next to nothing beside the layer
    options.context_tokens = std::max(options.context_tokens, tokens_);
    options.dtype = dtype_;
    BenchModels models;
    RETURN_IF_ERROR(models.Make({&options, 1}));
    engine_.model_path = models.folders().front();
    engine_.dtype = dtype_;
    ASSIGN_OR_RETURN(std::unique_ptr<PrefillEngine> pool, LoadEmbeddedEngine(engine_));
    pool_ = std::move(pool);
    return absl::OkStatus();
  }

  double Flops() const { return ModelFlops(pool_->model(), tokens_) - LmHeadFlops(pool_->model()); }
  double Mfu(const LayerSeconds& seconds) const { return Flops() / seconds.whole / pool_->peak_flops(); }

  std::string Json(const LayerSeconds& seconds) const {
    const nlohmann::ordered_json json = {{"backend", pool_->backend_name()},
                                         {"dtype", DTypeName(pool_->model().dtype)},
                                         {"tokens", tokens_},
                                         {"hidden", model_.hidden},
                                         {"intermediate", model_.intermediate},
                                         {"q_heads", model_.q_heads},
                                         {"kv_heads", model_.kv_heads},
                                         {"head_dim", model_.head_dim},
                                         {"seconds", seconds.whole},
                                         {"attention_seconds", seconds.attention},
                                         {"flops_per_second", Flops() / seconds.whole},
                                         {"peak_flops_per_second", pool_->peak_flops()},
                                         {"mfu", Mfu(seconds)}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text(const LayerSeconds& seconds) const {
    return absl::StrFormat(
        "%s, %s, %s tokens, hidden %d, intermediate %d, %d query and %d KV heads of %d\n"
        "layer           %s, of which attention %s\n"
        "MFU             %.1f %% of %.1f TFLOP/s\n",
        pool_->backend_name(), DTypeName(pool_->model().dtype), FormatCount(static_cast<double>(tokens_)),
        model_.hidden, model_.intermediate, model_.q_heads, model_.kv_heads, model_.head_dim,
        FormatSeconds(seconds.whole), FormatSeconds(seconds.attention), 100 * Mfu(seconds),
        pool_->peak_flops() / 1e12);
  }

  std::unique_ptr<PrefillEngine> pool_;
};

}  // namespace

std::unique_ptr<Command> AddBenchLayerCommand(CLI::App& parent) {
  return std::make_unique<BenchLayerCommand>(parent);
}

}  // namespace meshfill
