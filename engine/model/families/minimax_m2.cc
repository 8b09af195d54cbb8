// MiniMax-M2: Q and K normalised over all heads, half of a head rotated, experts in every layer
// (transformers' configuration_minimax_m2.py, and the keys of the published models).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/model/family.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr ExpertKeys kKeys = {.count = "num_local_experts",
                              .used = "num_experts_per_tok",
                              .width = nullptr,
                              .default_count = 256,
                              .default_used = 8,
                              .default_width = 0};

// What the published configs say beside: all of it must be what the family is.
void ExpectPublished(JsonKeys& keys) {
  keys.Expect("scoring_func", "sigmoid");
  keys.Expect("use_routing_bias", true);
  keys.Expect("use_qk_norm", true);
  keys.Expect("qk_norm_type", "per_layer");
  keys.Expect("shared_intermediate_size", 0);
  for (const char* key :
       {"layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"}) {
    keys.Expect(key, 1);
  }
  const json* kinds = keys.FindValue("attn_type_list");
  if (kinds != nullptr &&
      !std::all_of(kinds->begin(), kinds->end(), [](const json& kind) { return kind == 1; })) {
    keys.Reject("attn_type_list", "only full attention, 1, is implemented");
  }
  // Ignored: there is no shared expert, and no code of the folder is run.
  for (const char* key :
       {"use_mtp", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode", "auto_map"}) {
    keys.Find(key);
  }
}

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qk_norm = QkNorm::kHeads;
  config.rope.theta = 5e6;  // where no key says another
  ReadExperts(keys, kKeys, /*first=*/0, config);
  config.router.score = RouterScore::kSigmoid;
  config.router.normalised = true;
  config.router_correction = true;
  config.expert_names = {.router = "block_sparse_moe.gate",
                         .correction = "block_sparse_moe.e_score_correction_bias",
                         .gate = "block_sparse_moe.experts.*.w1",
                         .up = "block_sparse_moe.experts.*.w3",
                         .down = "block_sparse_moe.experts.*.w2"};
  const int64_t head_dim = config.shape.head_dim;
  config.rope.share =
      static_cast<double>(keys.Integer("rotary_dim", head_dim, 1, head_dim)) / static_cast<double>(head_dim);
  ExpectPublished(keys);
  config.unused_layers = static_cast<int>(keys.Integer("num_mtp_modules", 0, 0, 64));
}

void Write(const MakeModelOptions& options, json& config) {
  WriteExperts(options, kKeys, config);
  config["rotary_dim"] = config["head_dim"].get<int64_t>() / 4 * 2;
}

}  // namespace

const Family kMiniMaxM2Family = {.family = ModelFamily::kMiniMaxM2,
                                 .name = "minimax_m2",
                                 .architecture = "MiniMaxM2ForCausalLM",
                                 .hidden = 3072,
                                 .intermediate = 1536,
                                 .layers = 62,
                                 .q_heads = 48,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .vocab = 200064,
                                 .context_tokens = 196608,
                                 .has_experts = true,
                                 .partial_rotary = true,
                                 .next_layers_key = "num_mtp_modules",
                                 .read = Read,
                                 .write = Write};

}  // namespace meshfill
