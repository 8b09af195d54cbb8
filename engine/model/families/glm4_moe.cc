// GLM-4.5, 4.6 and 4.7: experts beside a shared one, dense first layers, half of a head rotated
// (transformers' configuration_glm4_moe.py).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/model/family.h"

namespace meshfill {
namespace {

constexpr ExpertKeys kKeys = {.count = "n_routed_experts",
                              .used = "num_experts_per_tok",
                              .width = "moe_intermediate_size",
                              .default_count = 128,
                              .default_used = 8,
                              .default_width = 1408};

// Groups of experts, as DeepSeek-V3 has them.
void ReadGroups(JsonKeys& keys, RouterRule& rule) {
  rule.groups = static_cast<int>(keys.Integer("n_group", 1, 1, rule.experts));
  rule.used_groups = static_cast<int>(keys.Integer("topk_group", 1, 1, rule.groups));
  const int of_group = rule.experts / rule.groups;
  if (rule.experts % rule.groups != 0 || (rule.groups > 1 && of_group < 2)) {
    keys.Reject("n_group",
                absl::StrCat("the ", rule.experts, " n_routed_experts must make groups of two or more"));
  } else if (rule.used > of_group * rule.used_groups) {
    keys.Reject("topk_group",
                absl::StrCat("its groups have fewer experts than the ", rule.used, " num_experts_per_tok"));
  }
}

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qkv_bias = keys.Flag("attention_bias", false);
  config.qk_norm = keys.Flag("use_qk_norm", false) ? QkNorm::kHead : QkNorm::kNone;
  config.rope.share = 0.5;
  const int64_t dense = keys.Integer("first_k_dense_replace", 1, 0, INT32_MAX);
  ReadExperts(keys, kKeys, std::min<int64_t>(dense, config.shape.layers), config);
  const int64_t shared = keys.Integer("n_shared_experts", 1, 0, 1024);
  config.shape.experts.shared_width = shared * config.shape.experts.width;
  config.router.score = RouterScore::kSigmoid;
  config.router.normalised = keys.Flag("norm_topk_prob", true);
  config.router.scale = static_cast<float>(keys.Number("routed_scaling_factor", 1, 1e-6, 1e6));
  config.router_correction = true;
  ReadGroups(keys, config.router);
  keys.Expect("scoring_func", "sigmoid");
  keys.Expect("topk_method", "noaux_tc");
  // Layers that predict further tokens: transformers leaves them out, too.
  config.unused_layers = static_cast<int>(
      std::max(keys.Integer("num_nextn_predict_layers", 0, 0, 64), keys.Integer("num_mtp_layers", 0, 0, 64)));
}

void Write(const MakeModelOptions& options, nlohmann::json& config) {
  WriteExperts(options, kKeys, config);
  config["n_shared_experts"] = 1;
  config["first_k_dense_replace"] = options.dense_layers.value_or(1);
  config["use_qk_norm"] = true;
  config["norm_topk_prob"] = true;
  config["n_group"] = 1;
  config["topk_group"] = 1;
  config["routed_scaling_factor"] = 1.0;
  config["partial_rotary_factor"] = config["head_dim"].get<int64_t>() % 4 == 0 ? 0.5 : 1.0;  // an even number
}

}  // namespace

const Family kGlm4MoeFamily = {.family = ModelFamily::kGlm4Moe,
                               .name = "glm4_moe",
                               .architecture = "Glm4MoeForCausalLM",
                               .hidden = 4096,
                               .intermediate = 10944,
                               .layers = 46,
                               .q_heads = 96,
                               .kv_heads = 8,
                               .head_dim = std::nullopt,
                               .vocab = 151552,
                               .context_tokens = 131072,
                               .norm_eps = 1e-5,
                               .has_experts = true,
                               .dense_layers = true,
                               .partial_rotary = true,
                               .next_layers_key = "num_nextn_predict_layers",
                               .read = Read,
                               .write = Write};

}  // namespace meshfill
