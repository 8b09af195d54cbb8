// The rotary embedding that a config.json asks for, as Hugging Face's modeling_rope_utils defines it.
#ifndef MESHFILL_ENGINE_MODEL_ROPE_CONFIG_H_
#define MESHFILL_ENGINE_MODEL_ROPE_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace meshfill {

class JsonKeys;

// The last position that kernels can name (kernels/band.h).
inline constexpr int64_t kMaxPosition = (int64_t{1} << 31) - 1;

enum class RopeScaling { kNone, kLinear, kLlama3, kYarn, kLongRope };

struct RopeConfig {
  double theta = 10000;
  double share = 1;  // fraction of a head's dimensions that RoPE rotates
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  double original_context_tokens = 0;                // llama3, yarn, longrope
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  double attention_factor = 1;                       // yarn, longrope, after defaults: multiplies cos and sin
  bool truncate = true;                              // yarn: round the correction range
  // longrope: [rotated dimensions / 2], what each period is multiplied with, in prompts to the original
  // context and in longer ones.
  std::vector<float> short_factors, long_factors;
};

// Reads `rope_theta`, and `rope_parameters` or `rope_scaling`, of a config's `top` object. `context_tokens`
// comes as max_position_embeddings and grows to what YaRN extends it to; `rope` with the family's own share,
// which `partial_rotary_factor` may change where `partial` says so. longrope has factors for the dimensions
// of heads of `head_dim` that are rotated.
//
// `local`: the embedding of layers with a window, where the family has another for them, else null. Its base
// is `rope_local_base_freq`, and the other keys are not its own; or `rope_parameters` has an object for
// `full_attention` and one for `sliding_attention`.
//
// Both come with the bases that count where no key says another. INVALID_ARGUMENT names the key and `path`.
absl::Status ParseRope(JsonKeys& top, const std::string& path, bool partial, int head_dim,
                       int64_t& context_tokens, RopeConfig& rope, RopeConfig* local);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_ROPE_CONFIG_H_
