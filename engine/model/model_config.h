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
#include "kernels/experts.h"

namespace meshfill {

enum class ModelFamily {
  kLlama,
  kMistral,
  kQwen2,
  kQwen3,
  kQwen3Moe,
  kMixtral,
  kGlm4Moe,
  kMiniMaxM2,
  kPhi3,
  kGemma3,
  kGptOss
};

// What Q and K are normalised over, before RoPE.
enum class QkNorm {
  kNone,
  kHead,   // each head, by one weight of head_dim
  kHeads,  // all heads of a token together
};

// What a family calls the tensors of an MLP with experts, after "model.layers.<layer>."; "*" stands for the
// expert's number.
struct ExpertNames {
  const char* router = "mlp.gate";
  const char* correction = "mlp.gate.e_score_correction_bias";  // whole, without ".weight"
  const char* gate = "mlp.experts.*.gate_proj";
  const char* up = "mlp.experts.*.up_proj";
  const char* down = "mlp.experts.*.down_proj";
  const char* gate_up = nullptr;  // not null: this, and `down`, are one tensor of all experts each
  const char* shared_gate = "mlp.shared_experts.gate_proj";
  const char* shared_up = "mlp.shared_experts.up_proj";
  const char* shared_down = "mlp.shared_experts.down_proj";
};

// The clamped SwiGLU of kernels/activation.h, of gates that lie beside their ups.
struct SwiGluClamp {
  float alpha = 0;
  float limit = 0;  // 0: the plain SwiGLU, of gates that lie before the ups
};

// Where the scales of matrices in FP8 are.
struct Fp8Config {
  const char* scales = nullptr;  // <name>.<scales> has the scales of <name>.weight; null: no matrix is in FP8
  Fp8Blocks blocks;
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  ModelShape shape;  // dtype: of the weights where config.json says one, but FP8
  Fp8Config fp8;
  float norm_eps = 1e-6f;
  float norm_offset = 0;       // what a norm multiplies with, less its weight in the file
  double embedding_scale = 1;  // factor on the embedding's rows, rounded to the compute dtype
  bool tied_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool fused_projections = false;  // q, k and v are one tensor, gate and up of a dense MLP another
  QkNorm qk_norm = QkNorm::kNone;
  bool sinks = false;             // each query head has a logit in the denominator of its softmax
  RopeConfig rope;                // rotary embedding of layers of LayerRope::kMain
  RopeConfig local_rope;          // rotary embedding of layers of LayerRope::kLocal
  std::vector<LayerForm> layers;  // [shape.layers]
  RouterRule router;              // rule of the layers that have experts
  bool router_correction = false;
  bool expert_bias = false;  // the experts and their router have biases
  SwiGluClamp swiglu_clamp;  // the experts' clamp
  ExpertNames expert_names;
  bool inside_another = false;  // engine/model/language_model.h
  int unused_layers =
      0;  // behind these in the files, for what a prefill does not do: predicting further tokens

  const RopeConfig& RopeOf(LayerRope which) const { return which == LayerRope::kMain ? rope : local_rope; }

  // `text` is the content of `path` (named in errors). INVALID_ARGUMENT names the key.
  static absl::StatusOr<ModelConfig> Parse(std::string_view text, std::string_view path);
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_CONFIG_H_
