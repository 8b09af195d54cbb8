// Qwen3: Q and K normalised per head (transformers' configuration_qwen3.py).
#include "engine/model/family.h"

namespace meshfill {
namespace {

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qkv_bias = config.o_bias = keys.Flag("attention_bias", false);
  config.qk_norm = QkNorm::kHead;
  ReadQwenWindows(keys, config);
}

}  // namespace

const Family kQwen3Family = {.family = ModelFamily::kQwen3,
                             .name = "qwen3",
                             .architecture = "Qwen3ForCausalLM",
                             .hidden = 4096,
                             .intermediate = 22016,
                             .layers = 32,
                             .q_heads = 32,
                             .kv_heads = 32,
                             .head_dim = 128,
                             .vocab = 151936,
                             .context_tokens = 32768,
                             .read = Read,
                             .write = [](const MakeModelOptions&, nlohmann::json&) {}};

}  // namespace meshfill
