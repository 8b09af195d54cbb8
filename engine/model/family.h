// What one family of models has of its own: a file each in families/, listed in family.cc.
#ifndef MESHFILL_ENGINE_MODEL_FAMILY_H_
#define MESHFILL_ENGINE_MODEL_FAMILY_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/model/make_model.h"
#include "engine/model/model_config.h"
#include "engine/model/strict_json.h"

namespace meshfill {

struct Family {
  ModelFamily family;
  const char* name;  // its model_type where that is null, and of make-model's --arch
  const char* architecture;
  const char* model_type = nullptr;
  // The names of models that read images, too, and have one of this family inside; null: there are none.
  const char* outer_architecture = nullptr;
  const char* outer_model_type = nullptr;

  // What an absent key means (transformers' configuration_<family>.py).
  int64_t hidden, intermediate, layers, q_heads;
  std::optional<int64_t> kv_heads;  // nullopt: as many as q_heads
  std::optional<int64_t> head_dim;  // nullopt: hidden / q_heads
  int64_t vocab, context_tokens;
  double norm_eps = 1e-6;
  bool tied_embeddings = false;
  const char* activation_key = "hidden_act";  // which may state that, but no other
  const char* activation = "silu";
  bool has_experts = false;
  bool has_window = false;      // make-model may choose a sliding window
  bool dense_layers = false;    // make-model may choose how many of the first layers are dense
  bool partial_rotary = false;  // partial_rotary_factor may say so
  bool local_rope = false;      // layers with a window have their own
  bool long_rope = false;       // longrope, that make-model may choose
  // How many layers behind the last predict further tokens, as make-model may choose; null: there are none.
  const char* next_layers_key = nullptr;

  const char* config_name() const { return model_type == nullptr ? name : model_type; }

  // Reads the keys that are the family's own: biases, norms of Q and K, the window or the MLP of each layer,
  // its experts, its share of RoPE. `config` has the shape, and layers that are dense and see all keys.
  void (*read)(JsonKeys& keys, ModelConfig& config);
  // Writes those keys for make-model.
  void (*write)(const MakeModelOptions& options, nlohmann::json& config);
};

extern const Family kLlamaFamily, kMistralFamily, kQwen2Family, kQwen3Family, kQwen3MoeFamily, kMixtralFamily,
    kGlm4MoeFamily, kMiniMaxM2Family, kPhi3Family, kGemma3Family, kGptOssFamily;

std::span<const Family* const> Families();
const Family& FamilyOf(ModelFamily family);  // every one is there

// "llama, mistral, … or qwen3".
std::string FamilyNames();

// ---- What several families have in common.

inline constexpr int64_t kDefaultWindow = 4096;

// Gives the layers the window that their number says, or `layer_types` where the config has them. With
// `by_layer` false, `layer_types` may only say the same.
void SetWindows(JsonKeys& keys, const std::vector<int64_t>& windows, std::optional<int64_t> window,
                bool by_layer, ModelConfig& config);
// use_sliding_window and max_window_layers, as Qwen2 and Qwen3 have them.
void ReadQwenWindows(JsonKeys& keys, ModelConfig& config);

// The keys by which a family names the sizes of its experts.
struct ExpertKeys {
  const char* count;
  const char* used;
  const char* width;  // null: intermediate_size, and there is no dense MLP
  int64_t default_count, default_used, default_width;
  const char* other_count = nullptr;  // what some configs write for `count`, or beside it
};
// Reads them, with bounds, into the shape and the router's rule; every layer from `first` on gets experts.
void ReadExperts(JsonKeys& keys, const ExpertKeys& names, int64_t first, ModelConfig& config);
// Writes them: 8 experts of which 2 are used where the options say nothing.
void WriteExperts(const MakeModelOptions& options, const ExpertKeys& names, nlohmann::json& config);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_FAMILY_H_
