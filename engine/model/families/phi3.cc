// Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another (transformers' configuration_phi3.py, and
// the keys of the published models). Those with longrope are refused: which of its factors count goes by the
// length of the prompt.
#include "absl/strings/str_cat.h"
#include "engine/model/family.h"
#include "engine/model/rope_config.h"

namespace meshfill {
namespace {

using nlohmann::json;

// transformers takes "yarn" for longrope here, and knows no other.
void ExpectDefaultRope(JsonKeys& keys) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* rope = keys.FindValue(key);
    if (rope == nullptr || !rope->is_object()) continue;  // ParseRope's to say
    for (const char* type : {"rope_type", "type"}) {
      if (rope->contains(type) && rope->at(type) != "default") {
        keys.Reject(key, "in this architecture only the type default is implemented");
      }
    }
  }
}

void Read(JsonKeys& keys, ModelConfig& config) {
  config.fused_projections = true;
  const std::optional<int64_t> window = keys.OptionalInteger("sliding_window", std::nullopt, 1, kMaxPosition);
  SetWindows(keys, std::vector<int64_t>(config.layers.size(), window.value_or(0)), window, /*by_layer=*/false,
             config);
  ExpectDefaultRope(keys);
  keys.Expect("attention_bias", false);
  keys.Expect("lm_head_bias", false);
  keys.Expect("full_attn_mod", 1);
  keys.Expect("interpolate_factor", 1);
  // Of no account: nothing is dropped in a prefill, and no code of the folder is run.
  for (const char* key : {"resid_pdrop", "embd_pdrop", "auto_map"}) keys.Find(key);
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
                            .read = Read,
                            .write = [](const MakeModelOptions&, json&) {}};

}  // namespace meshfill
