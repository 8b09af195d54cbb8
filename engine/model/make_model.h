// Writes a model of random weights as a Hugging Face folder: for demos, tests and benchmarks.
#ifndef MESHFILL_ENGINE_MODEL_MAKE_MODEL_H_
#define MESHFILL_ENGINE_MODEL_MAKE_MODEL_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "engine/model/model_config.h"

namespace meshfill {

// What shares a scale of weights in FP8.
enum class Fp8Scales {
  kBlock,    // blocks of 128 · 128, as Qwen3-FP8 and MiniMax-M2 ship
  kChannel,  // a row of a matrix, in the form of compressed-tensors, as GLM-FP8 ships
  kTensor,   // a matrix, in that form
};

struct MakeModelOptions {
  ModelFamily family = ModelFamily::kLlama;
  int layers = 2;
  int64_t hidden = 256;
  int64_t intermediate = 0;  // 0: 8/3 of hidden, rounded up to a multiple of 64
  int q_heads = 4;
  int kv_heads = 2;
  int head_dim = 0;  // 0: hidden / q_heads
  int64_t vocab = 256;
  int64_t context_tokens = 4194304;
  int64_t original_context_tokens = 0;  // Phi-3 only, for longrope; 0: the model has none
  int64_t sliding_window = 0;           // Mistral (0: none), Gemma 3 (0: 1024), gpt-oss (0: 128) only
  int experts = 0;                      // this and the next two: only families that have experts; 0: 8
  int experts_used = 0;                 // experts that each token goes through; 0: 2
  int64_t expert_width = 0;             // 0: intermediate
  // First layers whose MLP is dense, of Qwen3-MoE (nullopt: none) and GLM (nullopt: 1) only.
  std::optional<int> dense_layers = std::nullopt;
  int next_layers = 0;  // layers behind the last that predict further tokens, of GLM and MiniMax only
  double rope_theta = 1000000;
  bool tied_embeddings = false;
  // Weights' dtype. FP8: the layers' matrices, with scales; the rest is bf16. MXFP4: gpt-oss's experts; the
  // rest is bf16.
  DType dtype = DType::kBf16;
  Fp8Scales fp8_scales = Fp8Scales::kBlock;  // of FP8 only
  uint64_t seed = 1;                         // same options, same bytes
  int64_t shard_bytes = int64_t{2} << 30;    // a model above this is split into shards with an index
};

// Creates `folder` (ALREADY_EXISTS where it is there and not empty) with config.json and model*.safetensors.
// No tensor is in memory whole. INVALID_ARGUMENT names the option, or the key of config.json that it makes.
absl::Status MakeModel(const MakeModelOptions& options, const std::string& folder);

// The same for a config.json at `config_path`, of any model that can be loaded: a copy of it, and the tensors
// that it asks for. INVALID_ARGUMENT names the key. Other errors: those of MakeModel and of reading the file.
absl::Status MakeModelOf(const std::string& config_path, uint64_t seed, int64_t shard_bytes,
                         const std::string& folder);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MAKE_MODEL_H_
