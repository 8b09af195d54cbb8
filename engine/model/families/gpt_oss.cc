// gpt-oss: attention sinks, windows in every other layer, experts with biases whose gates and ups lie beside
// each other (transformers' configuration_gpt_oss.py, and the keys of the published models).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/model/family.h"

namespace meshfill {
namespace {

constexpr ExpertKeys kKeys = {.count = "num_local_experts",
                              .used = "num_experts_per_tok",
                              .width = nullptr,
                              .default_count = 128,
                              .default_used = 4,
                              .default_width = 0};
constexpr int64_t kGptOssWindow = 128;

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qkv_bias = config.o_bias = keys.Flag("attention_bias", true);
  config.sinks = true;
  config.expert_bias = true;
  config.expert_names = {
      .router = "mlp.router", .down = "mlp.experts.down_proj", .gate_up = "mlp.experts.gate_up_proj"};
  ReadExperts(keys, kKeys, /*first=*/0, config);
  // The softmax over the chosen experts is that over all of them, divided by what the chosen have of it.
  config.router.normalised = true;
  config.swiglu_clamp = {.alpha = static_cast<float>(keys.Number("swiglu_alpha", 1.702, 1e-3, 1e3)),
                         .limit = static_cast<float>(keys.Number("swiglu_limit", 7, 1e-3, 1e6))};
  const std::optional<int64_t> window =
      keys.OptionalInteger("sliding_window", kGptOssWindow, 1, kMaxPosition);
  std::vector<int64_t> windows(config.layers.size(), 0);
  for (size_t layer = 0; layer < windows.size(); layer += 2) windows[layer] = window.value_or(0);
  SetWindows(keys, windows, window, /*by_layer=*/true, config);
  config.rope.theta = 150000;  // where no key says another
  if (keys.FindValue("rope_scaling") == nullptr && keys.FindValue("rope_parameters") == nullptr) {
    keys.RejectMissing("rope_scaling",
                       "it says how positions are stretched, as the published models' yarn does");
  }
  keys.Expect("experts_per_token", config.shape.experts.used);  // num_experts_per_tok by another name
  keys.Find("initial_context_length");  // ignored: rope_scaling has the same by another name
}

// Positions are stretched as in the published models: as far as the context reaches.
void Write(const MakeModelOptions& options, nlohmann::json& config) {
  constexpr int64_t kFactor = 32;
  WriteExperts(options, kKeys, config);
  config["attention_bias"] = true;
  config["sliding_window"] = options.sliding_window != 0 ? options.sliding_window : kGptOssWindow;
  config["swiglu_limit"] = 7.0;
  const int64_t original = options.context_tokens / kFactor;
  config["rope_scaling"] = {{"rope_type", "default"}};
  if (original > 0) {
    config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", static_cast<double>(kFactor)},
                              {"beta_fast", 32.0},   {"beta_slow", 1.0},
                              {"truncate", false},   {"original_max_position_embeddings", original}};
  }
}

}  // namespace

const Family kGptOssFamily = {.family = ModelFamily::kGptOss,
                              .name = "gpt_oss",
                              .architecture = "GptOssForCausalLM",
                              .hidden = 2880,
                              .intermediate = 2880,
                              .layers = 36,
                              .q_heads = 64,
                              .kv_heads = 8,
                              .head_dim = 64,
                              .vocab = 201088,
                              .context_tokens = 131072,
                              .norm_eps = 1e-5,
                              .has_experts = true,
                              .has_window = true,
                              .read = Read,
                              .write = Write};

}  // namespace meshfill
