#include "server/cli/bench/bench_experts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/median.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/bench/bench_models.h"
#include "server/cli/bench/layer_bench.h"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

// One of the two models.
struct Measured {
  std::unique_ptr<PrefillEngine> engine;
  std::vector<double> mlp_seconds, seconds;  // by run: of the MLPs, and of all layers
};

constexpr int64_t kVocab = 4096;  // tokens that differ, so that they use all experts

// The shape of Qwen3-30B-A3B's layers.
MakeModelOptions ThirtyBillions() {
  return {.family = ModelFamily::kQwen3Moe,
          .layers = 1,
          .hidden = 2048,
          .q_heads = 32,
          .kv_heads = 4,
          .head_dim = 128,
          .vocab = kVocab,
          .experts = 128,
          .experts_used = 8,
          .expert_width = 768};
}

class BenchExpertsCommand : public LayerBenchCommand {
 public:
  explicit BenchExpertsCommand(CLI::App& parent)
      : LayerBenchCommand(
            parent.add_subcommand(
                "experts", "Layers of experts beside dense ones, whose MLP takes as many FLOPs for a token"),
            ThirtyBillions(), 8192) {
    AddCount(*app_, "--layers", model_.layers, "Layers of each model");
    AddCount(*app_, "--experts", model_.experts, "Experts of a layer");
    AddCount(*app_, "--experts-used", model_.experts_used, "Experts that each token goes through");
    AddCount(*app_, "--expert-width", model_.expert_width, "Width of an expert");
  }

  absl::Status Run() override {
    const SpareMappings spare;  // one prefill leaves its memory to the next, as in a server in use
    RETURN_IF_ERROR(Load());
    std::mt19937 random(1);
    std::vector<uint32_t> prompt(static_cast<size_t>(tokens_));
    for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % kVocab);
    for (int run = -1; run < repeats_; ++run) {  // the first warms caches, and picks algorithms
      for (Measured& measured : measured_) {
        ASSIGN_OR_RETURN(PrefillResult result,
                         RunPrefill(*measured.engine, {prompt, {.keep_timeline = true}}));
        if (run >= 0) Add(*result.timeline, measured);
      }
    }
    std::fputs(json_ ? Json().c_str() : Text().c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status Load() {
    MakeModelOptions experts = model_, dense = model_;
    experts.intermediate = model_.expert_width;
    dense.family = ModelFamily::kQwen3;
    dense.intermediate = model_.experts_used * model_.expert_width;
    dense.experts = dense.experts_used = 0;
    dense.expert_width = 0;
    const std::array<MakeModelOptions, 2> options = {experts, dense};
    BenchModels models;
    RETURN_IF_ERROR(models.Make(options));
    for (size_t model = 0; model < options.size(); ++model) {
      engine_.model_path = models.folders()[model];
      engine_.dtype = dtype_;
      ASSIGN_OR_RETURN(measured_[model].engine, LoadEmbeddedEngine(engine_));
      RETURN_IF_ERROR(measured_[model].engine->MakePlan(tokens_, {}).status());  // before the prompt is
    }
    return absl::OkStatus();
  }

  static void Add(const Timeline& timeline, Measured& measured) {
    double mlp = 0, begin = timeline.end_seconds(), end = 0;
    for (const Span& span : timeline.spans) {
      if (span.layer < 0) continue;
      begin = std::min(begin, span.start_seconds);
      end = std::max(end, span.end_seconds);
      if (span.what == "mlp") mlp += span.seconds();
    }
    measured.mlp_seconds.push_back(mlp);
    measured.seconds.push_back(end - begin);
  }

  // Of what both compute; the router's are left out.
  double MlpFlops() const {
    return 6.0 * static_cast<double>(model_.hidden * model_.expert_width * model_.experts_used) *
           static_cast<double>(tokens_) * model_.layers;
  }
  double FlopsPerSecond(const Measured& measured) const { return MlpFlops() / Median(measured.mlp_seconds); }
  double MlpRatio() const { return Median(measured_[1].mlp_seconds) / Median(measured_[0].mlp_seconds); }
  double Ratio() const { return Median(measured_[1].seconds) / Median(measured_[0].seconds); }

  std::string Json() const {
    const auto of = [this](const Measured& measured) {
      return nlohmann::ordered_json{{"mlp_seconds", Median(measured.mlp_seconds)},
                                    {"mlp_flops_per_second", FlopsPerSecond(measured)},
                                    {"seconds", Median(measured.seconds)}};
    };
    const nlohmann::ordered_json json = {{"backend", measured_[0].engine->backend_name()},
                                         {"dtype", DTypeName(dtype_)},
                                         {"tokens", tokens_},
                                         {"layers", model_.layers},
                                         {"hidden", model_.hidden},
                                         {"experts", model_.experts},
                                         {"experts_used", model_.experts_used},
                                         {"expert_width", model_.expert_width},
                                         {"with_experts", of(measured_[0])},
                                         {"dense", of(measured_[1])},
                                         {"mlp_ratio", MlpRatio()},
                                         {"ratio", Ratio()}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text() const {
    std::string text = absl::StrFormat(
        "%s, %s, %s tokens, %d layers, hidden %d, %d of %d experts of %d\n",
        measured_[0].engine->backend_name(), DTypeName(dtype_), FormatCount(static_cast<double>(tokens_)),
        model_.layers, model_.hidden, model_.experts_used, model_.experts, model_.expert_width);
    const std::array<const char*, 2> names = {"experts", "dense"};
    for (size_t model = 0; model < names.size(); ++model) {
      const Measured& of = measured_[model];
      absl::StrAppendFormat(&text, "%-8s  layers %s, of which MLPs %s: %.1f GFLOP/s\n", names[model],
                            FormatSeconds(Median(of.seconds)), FormatSeconds(Median(of.mlp_seconds)),
                            FlopsPerSecond(of) / 1e9);
    }
    absl::StrAppendFormat(&text, "experts over dense, FLOP/s: MLPs %.3f, layers %.3f\n", MlpRatio(), Ratio());
    return text;
  }

  std::array<Measured, 2> measured_;  // with experts, and dense
};

}  // namespace

std::unique_ptr<Command> AddBenchExpertsCommand(CLI::App& parent) {
  return std::make_unique<BenchExpertsCommand>(parent);
}

}  // namespace meshfill
