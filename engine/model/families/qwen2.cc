// Qwen2 and 2.5: biases of Q, K and V (transformers' configuration_qwen2.py).
#include "engine/model/family.h"

namespace meshfill {
namespace {

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qkv_bias = true;
  keys.Expect("attention_bias", true);
  ReadQwenWindows(keys, config);
}

}  // namespace

const Family kQwen2Family = {.family = ModelFamily::kQwen2,
                             .name = "qwen2",
                             .architecture = "Qwen2ForCausalLM",
                             .hidden = 4096,
                             .intermediate = 22016,
                             .layers = 32,
                             .q_heads = 32,
                             .kv_heads = 32,
                             .head_dim = std::nullopt,
                             .vocab = 151936,
                             .context_tokens = 32768,
                             .read = Read,
                             .write = [](const MakeModelOptions&, nlohmann::json&) {}};

}  // namespace meshfill
