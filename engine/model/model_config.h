// config.json of a Hugging Face folder, read strictly: what it asks for and the code does not do is an error
// by name.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_
#define MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/model/rope_config.h"

namespace meshfill {

enum class ModelFamily { kLlama, kMistral, kQwen2, kQwen3 };

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  ModelShape shape;  // dtype: of the weights where config.json says one
  float norm_eps = 1e-6f;
  bool tied_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;
  RopeConfig rope;
  std::vector<int64_t> layer_window;  // [layers], tokens; 0: none

  // `text` is the content of `path` (named in errors). INVALID_ARGUMENT names the key.
  static absl::StatusOr<ModelConfig> Parse(std::string_view text, std::string_view path);
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_
