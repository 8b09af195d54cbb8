// Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another, and longrope where the context is long
// (transformers' configuration_phi3.py, and the keys of the published models).
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/rope_config.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr const char* kOriginalContext = "original_max_position_embeddings";

// transformers takes "yarn" for longrope here, and knows no other.
bool IsKnownRope(const json& type) { return type == "default" || type == "longrope" || type == "su"; }

void ExpectKnownRope(JsonKeys& keys) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* rope = keys.FindValue(key);
    if (rope == nullptr || !rope->is_object()) continue;  // ParseRope's to say
    for (const char* type : {"rope_type", "type"}) {
      if (!rope->contains(type)) continue;
      if (!IsKnownRope(rope->at(type))) {
        keys.Reject(key, "in this architecture the types default and longrope are implemented");
      } else if (rope->at(type) != "default" && keys.FindValue(kOriginalContext) == nullptr) {
        // Without it transformers takes 4096, whatever the object says.
        keys.RejectMissing(kOriginalContext, "longrope needs it: longer prompts have the long factors");
      }
    }
  }
}

void Read(JsonKeys& keys, ModelConfig& config) {
  config.fused_projections = true;
  const std::optional<int64_t> window = keys.OptionalInteger("sliding_window", std::nullopt, 1, kMaxPosition);
  SetWindows(keys, std::vector<int64_t>(config.layers.size(), window.value_or(0)), window, /*by_layer=*/false,
             config);
  ExpectKnownRope(keys);
  keys.Expect("attention_bias", false);
  keys.Expect("lm_head_bias", false);
  keys.Expect("full_attn_mod", 1);
  keys.Expect("interpolate_factor", 1);
  // Ignored: nothing is dropped in a prefill, and no code of the folder is run.
  for (const char* key : {"resid_pdrop", "embd_pdrop", "auto_map"}) keys.Find(key);
}

// Short factors of about 1, long ones that grow to what the context is of the original one.
void Write(const MakeModelOptions& options, json& config) {
  if (options.original_context_tokens == 0) return;
  constexpr int64_t kMost = 1024;  // the parser refuses heads of more dimensions
  const int64_t half = std::min(config["head_dim"].get<int64_t>(), kMost) / 2;
  const double stretch = std::max(1.0, static_cast<double>(options.context_tokens) /
                                           static_cast<double>(options.original_context_tokens));
  std::vector<double> short_factors, long_factors;
  for (int64_t i = 0; i < half; ++i) {
    const double share = static_cast<double>(i + 1) / static_cast<double>(half);
    short_factors.push_back(1 + share / 8);
    long_factors.push_back(std::pow(stretch, share));
  }
  config[kOriginalContext] = options.original_context_tokens;
  config["rope_scaling"] = {
      {"type", "longrope"}, {"short_factor", short_factors}, {"long_factor", long_factors}};
}

}  // namespace

const Family kPhi3Family = {.family = ModelFamily::kPhi3,
                            .name = "phi3",
                            .architecture = "Phi3ForCausalLM",
                            .hidden = 3072,
                            .intermediate = 8192,
                            .layers = 32,
                            .q_heads = 32,
                            .kv_heads = std::nullopt,
                            .head_dim = std::nullopt,
                            .vocab = 32064,
                            .context_tokens = 4096,
                            .norm_eps = 1e-5,
                            .partial_rotary = true,
                            .long_rope = true,
                            .read = Read,
                            .write = Write};

}  // namespace meshfill
