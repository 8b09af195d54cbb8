// Mistral: a sliding window in all layers (transformers' configuration_mistral.py).
#include "engine/model/family.h"

namespace meshfill {
namespace {

void Read(JsonKeys& keys, ModelConfig& config) {
  keys.Expect("attention_bias", false);
  const std::optional<int64_t> window =
      keys.OptionalInteger("sliding_window", kDefaultWindow, 1, kMaxPosition);
  SetWindows(keys, std::vector<int64_t>(config.layers.size(), window.value_or(0)), window, /*by_layer=*/false,
             config);
}

void Write(const MakeModelOptions& options, nlohmann::json& config) {
  config["sliding_window"] =
      options.sliding_window != 0 ? nlohmann::json(options.sliding_window) : nlohmann::json(nullptr);
}

}  // namespace

const Family kMistralFamily = {.family = ModelFamily::kMistral,
                               .name = "mistral",
                               .architecture = "MistralForCausalLM",
                               .hidden = 4096,
                               .intermediate = 14336,
                               .layers = 32,
                               .q_heads = 32,
                               .kv_heads = 8,
                               .head_dim = std::nullopt,
                               .vocab = 32000,
                               .context_tokens = 131072,
                               .has_window = true,
                               .read = Read,
                               .write = Write};

}  // namespace meshfill
