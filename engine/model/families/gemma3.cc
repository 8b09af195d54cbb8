// Gemma 3: norms before and behind each sublayer, windows in five of six layers, and a rotary embedding of
// their own for these (transformers' configuration_gemma3.py, and the keys of the published models).
#include <algorithm>
#include <cmath>

#include "engine/model/family.h"
#include "engine/model/rope_config.h"

namespace meshfill {
namespace {

constexpr int64_t kPattern = 6;  // every sixth layer sees all keys

// Reads which layers have a window from `layer_types`, or from `sliding_window_pattern`.
void ReadWindows(JsonKeys& keys, ModelConfig& config) {
  const int64_t window = keys.Integer("sliding_window", kDefaultWindow, 1, kMaxPosition);
  const int64_t pattern = keys.Integer("sliding_window_pattern", kPattern, 1, INT32_MAX);
  keys.Find("_sliding_window_pattern");  // what transformers writes beside layer_types, and does not read
  std::vector<int64_t> windows(config.layers.size(), window);
  for (size_t layer = pattern - 1; layer < windows.size(); layer += pattern) windows[layer] = 0;
  SetWindows(keys, windows, window, /*by_layer=*/true, config);
  for (LayerForm& layer : config.layers) {
    layer.rope = layer.window == 0 ? LayerRope::kMain : LayerRope::kLocal;
  }
}

void Read(JsonKeys& keys, ModelConfig& config) {
  ModelShape& shape = config.shape;
  shape.activation = Activation::kGelu;
  shape.post_norms = true;
  shape.score_scalar = keys.Number("query_pre_attn_scalar", 256, 1e-3, 1e9);
  config.norm_offset = 1;
  config.embedding_scale = std::sqrt(static_cast<double>(shape.hidden));
  config.qkv_bias = config.o_bias = keys.Flag("attention_bias", false);
  config.qk_norm = QkNorm::kHead;
  config.rope.theta = 1e6;  // where no key says another
  config.local_rope.theta = 1e4;
  ReadWindows(keys, config);
  keys.Expect("attn_logit_softcapping", nullptr);
  keys.Expect("final_logit_softcapping", nullptr);
  keys.Expect("use_bidirectional_attention", false);
  keys.Find("hidden_act");  // ignored: the family has hidden_activation instead
}

void Write(const MakeModelOptions& options, nlohmann::json& config) {
  config["query_pre_attn_scalar"] = config["head_dim"];
  config["rope_local_base_freq"] = 10000.0;
  config["sliding_window"] = options.sliding_window != 0 ? options.sliding_window : int64_t{1024};
  config["sliding_window_pattern"] = std::clamp<int64_t>(options.layers, 1, kPattern);
}

}  // namespace

const Family kGemma3Family = {.family = ModelFamily::kGemma3,
                              .name = "gemma3",
                              .architecture = "Gemma3ForCausalLM",
                              .model_type = "gemma3_text",
                              .outer_architecture = "Gemma3ForConditionalGeneration",
                              .outer_model_type = "gemma3",
                              .hidden = 2304,
                              .intermediate = 9216,
                              .layers = 26,
                              .q_heads = 8,
                              .kv_heads = 4,
                              .head_dim = 256,
                              .vocab = 262208,
                              .context_tokens = 131072,
                              .tied_embeddings = true,
                              .activation_key = "hidden_activation",
                              .activation = "gelu_pytorch_tanh",
                              .has_window = true,
                              .local_rope = true,
                              .read = Read,
                              .write = Write};

}  // namespace meshfill
