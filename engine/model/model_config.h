// config.json of a Hugging Face folder, read strictly: what it asks for and the code does not do is an error by name.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_
#define MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model_shape.h"

namespace meshfill {

enum class ModelFamily { kLlama, kMistral, kQwen2, kQwen3 };

enum class RopeScaling { kNone, kLinear, kLlama3, kYarn };

// Rotary embedding as Hugging Face's modeling_rope_utils defines it.
struct RopeConfig {
  double theta = 10000;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  double original_context_tokens = 0;            // llama3, yarn
  double low_freq_factor = 1, high_freq_factor = 4;              // llama3
  double beta_fast = 32, beta_slow = 1;          // yarn
  double attention_factor = 1;                   // yarn, after defaults: multiplies cos and sin
  bool truncate = true;                          // yarn: round the correction range
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  ModelShape shape;                              // dtype: of the weights where config.json says one
  float norm_eps = 1e-6f;
  bool tied_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;
  RopeConfig rope;
  std::vector<int64_t> layer_window;             // [layers], tokens; 0: none

  // `text` is the content of `path` (named in errors). INVALID_ARGUMENT names the key.
  static absl::StatusOr<ModelConfig> Parse(std::string_view text, std::string_view path);
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_
