// Llama 2 and 3 (transformers' configuration_llama.py).
#include "engine/model/family.h"

namespace meshfill {
namespace {

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qkv_bias = config.o_bias = keys.Flag("attention_bias", false);
  config.mlp_bias = keys.Flag("mlp_bias", false);
  SetWindows(keys, std::vector<int64_t>(config.layers.size(), 0), std::nullopt, /*by_layer=*/false, config);
}

}  // namespace

const Family kLlamaFamily = {.family = ModelFamily::kLlama,
                             .name = "llama",
                             .architecture = "LlamaForCausalLM",
                             .hidden = 4096,
                             .intermediate = 11008,
                             .layers = 32,
                             .q_heads = 32,
                             .kv_heads = std::nullopt,
                             .head_dim = std::nullopt,
                             .vocab = 32000,
                             .context_tokens = 2048,
                             .read = Read,
                             .write = [](const MakeModelOptions&, nlohmann::json&) {}};

}  // namespace meshfill
