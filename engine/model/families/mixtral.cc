// Mixtral: Mistral with experts in every layer (transformers' configuration_mixtral.py).
#include "engine/model/family.h"

namespace meshfill {
namespace {

constexpr ExpertKeys kKeys = {.count = "num_local_experts",
                              .used = "num_experts_per_tok",
                              .width = nullptr,
                              .default_count = 8,
                              .default_used = 2,
                              .default_width = 0};

void Read(JsonKeys& keys, ModelConfig& config) {
  keys.Expect("attention_bias", false);
  ReadExperts(keys, kKeys, /*first=*/0, config);
  config.router.normalised = true;
  config.rope.theta = 1e6;  // where no key says another
  config.expert_names = {.router = "block_sparse_moe.gate",
                         .gate = "block_sparse_moe.experts.*.w1",
                         .up = "block_sparse_moe.experts.*.w3",
                         .down = "block_sparse_moe.experts.*.w2"};
  const std::optional<int64_t> window = keys.OptionalInteger("sliding_window", std::nullopt, 1, kMaxPosition);
  for (LayerForm& layer : config.layers) layer.window = window.value_or(0);
}

void Write(const MakeModelOptions& options, nlohmann::json& config) { WriteExperts(options, kKeys, config); }

}  // namespace

const Family kMixtralFamily = {.family = ModelFamily::kMixtral,
                               .name = "mixtral",
                               .architecture = "MixtralForCausalLM",
                               .hidden = 4096,
                               .intermediate = 14336,
                               .layers = 32,
                               .q_heads = 32,
                               .kv_heads = 8,
                               .head_dim = std::nullopt,
                               .vocab = 32000,
                               .context_tokens = 131072,
                               .norm_eps = 1e-5,
                               .has_experts = true,
                               .read = Read,
                               .write = Write};

}  // namespace meshfill
