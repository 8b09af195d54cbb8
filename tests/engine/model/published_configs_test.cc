// Published models by the keys and values of their config.json: each is read, and as the shape that it has.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/model_config.h"
#include "tests/engine/model/config_json.h"

namespace meshfill {
namespace {

using nlohmann::json;

// What most of them say beside, which no prefill depends on.
json WithBookkeeping(const char* text) {
  json config = json::parse(text);
  config.update({{"attention_dropout", 0.0},
                 {"bos_token_id", 1},
                 {"initializer_range", 0.02},
                 {"transformers_version", "4.51.0"},
                 {"use_cache", true}});
  return config;
}

json Llama31() {
  return WithBookkeeping(R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256})");
}

json Mistral7B() {
  return WithBookkeeping(R"({"architectures": ["MistralForCausalLM"], "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "vocab_size": 32000})");
}

// With the rope_scaling that its model card gives for long prompts.
json Qwen25WithYarn() {
  return WithBookkeeping(R"({"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vocab_size": 152064})");
}

json Qwen38B() {
  return WithBookkeeping(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vocab_size": 151936})");
}

json Qwen330B() {
  return WithBookkeeping(R"({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vocab_size": 151936})");
}

json Qwen330BFp8() {
  std::vector<std::string> wide = {"lm_head"};
  for (int layer = 0; layer < 48; ++layer) {
    for (const char* module : {"input_layernorm", "mlp.gate", "post_attention_layernorm"}) {
      wide.push_back(absl::StrCat("model.layers.", layer, ".", module));
    }
  }
  return With(Qwen330B(), {{"quantization_config",
                            {{"activation_scheme", "dynamic"},
                             {"fmt", "e4m3"},
                             {"modules_to_not_convert", wide},
                             {"quant_method", "fp8"},
                             {"weight_block_size", {128, 128}}}}});
}

json Mixtral8x7B() {
  return WithBookkeeping(R"({"architectures": ["MixtralForCausalLM"], "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000})");
}

json Glm45Air() {
  return WithBookkeeping(R"({"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": false, "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": false,
    "vocab_size": 151552})");
}

json PublishedMiniMaxM2() {
  json config = WithBookkeeping(R"({"architectures": ["MiniMaxM2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608, "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "output_router_logits": false, "qk_norm_type": "per_layer",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
      "weight_block_size": [128, 128],
      "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid", "sliding_window": null, "tie_word_embeddings": false, "use_mtp": true,
    "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064})");
  config["attn_type_list"] = std::vector<int>(62, 1);
  return config;
}

json GptOss20B() {
  json config = WithBookkeeping(R"({"architectures": ["GptOssForCausalLM"], "attention_bias": true,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": false, "pad_token_id": 199999,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
      "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
      "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": false, "vocab_size": 201088})");
  for (int layer = 0; layer < 24; ++layer) {
    config["layer_types"].push_back(layer % 2 == 0 ? "sliding_attention" : "full_attention");
  }
  return config;
}

json Gemma31B() {
  return WithBookkeeping(R"({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
    "attn_logit_softcapping": null, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144})");
}

json Gemma34B() {
  return json::parse(R"({"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
      "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
      "sliding_window": 1024},
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
      "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
      "patch_size": 14, "vision_use_head": false}})");
}

// The factors are not the published ones: a number for each of the 48 pairs of dimensions.
json Phi3Mini128k() {
  json config = WithBookkeeping(R"({"_name_or_path": "Phi-3-mini-128k-instruct",
    "architectures": ["Phi3ForCausalLM"], "attention_bias": false,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
      "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": {"type": "longrope"}, "rope_theta": 10000.0,
    "sliding_window": 262144, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "vocab_size": 32064})");
  std::vector<double> factors(48);
  std::iota(factors.begin(), factors.end(), 1.0);
  config["rope_scaling"]["long_factor"] = config["rope_scaling"]["short_factor"] = factors;
  return config;
}

json Phi4() {
  return WithBookkeeping(R"({"architectures": ["Phi3ForCausalLM"], "attention_bias": false,
    "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3",
    "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 100352})");
}

struct Published {
  const char* name;
  json config;
  int layers, q_heads, kv_heads, head_dim;
  int64_t vocab, context_tokens;
  RopeScaling rope;
  int rotated_dim;
  int experts = 0, used = 0;
  int expert_layers = 0;
  int64_t window = 0;
  int window_layers = 0;
  bool fp8 = false, fp4 = false;
};

TEST(PublishedConfigs, HaveTheirShapes) {
  using enum RopeScaling;
  const Published kModels[] = {
      {"Llama 3.1 8B", Llama31(), 32, 32, 8, 128, 128256, 131072, kLlama3, 128},
      {"Mistral 7B v0.1", Mistral7B(), 32, 32, 8, 128, 32000, 32768, kNone, 128, 0, 0, 0, 4096, 32},
      {"Qwen2.5 7B with YaRN", Qwen25WithYarn(), 28, 28, 4, 128, 152064, 131072, kYarn, 128},
      {"Qwen3 8B", Qwen38B(), 36, 32, 8, 128, 151936, 40960, kNone, 128},
      {"Qwen3 30B-A3B", Qwen330B(), 48, 32, 4, 128, 151936, 40960, kNone, 128, 128, 8, 48},
      {"Qwen3 30B-A3B FP8", Qwen330BFp8(), 48, 32, 4, 128, 151936, 40960, kNone, 128, 128, 8, 48, 0, 0, true},
      {"Mixtral 8x7B", Mixtral8x7B(), 32, 32, 8, 128, 32000, 32768, kNone, 128, 8, 2, 32},
      {"GLM-4.5-Air", Glm45Air(), 46, 96, 8, 128, 151552, 131072, kNone, 64, 128, 8, 45},
      {"MiniMax-M2", PublishedMiniMaxM2(), 62, 48, 8, 128, 200064, 196608, kNone, 64, 256, 8, 62, 0, 0, true},
      {"gpt-oss 20B", GptOss20B(), 24, 64, 8, 64, 201088, 131072, kYarn, 64, 32, 4, 24, 128, 12, false, true},
      {"Gemma 3 1B", Gemma31B(), 26, 4, 1, 256, 262144, 32768, kNone, 256, 0, 0, 0, 512, 22},
      {"Gemma 3 4B", Gemma34B(), 34, 8, 4, 256, 262208, 131072, kLinear, 256, 0, 0, 0, 1024, 29},
      {"Phi-3 mini 128k", Phi3Mini128k(), 32, 32, 32, 96, 32064, 131072, kLongRope, 96, 0, 0, 0, 262144, 32},
      {"Phi-4", Phi4(), 40, 40, 10, 128, 100352, 16384, kNone, 128},
  };
  for (const Published& model : kModels) {
    SCOPED_TRACE(model.name);
    const ModelConfig config = ParseGood(model.config);
    const ModelShape& shape = config.shape;
    EXPECT_EQ(shape.layers, model.layers);
    EXPECT_EQ(shape.q_heads, model.q_heads);
    EXPECT_EQ(shape.kv_heads, model.kv_heads);
    EXPECT_EQ(shape.head_dim, model.head_dim);
    EXPECT_EQ(shape.vocab, model.vocab);
    EXPECT_EQ(shape.context_tokens, model.context_tokens);
    EXPECT_EQ(shape.dtype, DType::kBf16);
    EXPECT_EQ(config.rope.scaling, model.rope);
    EXPECT_EQ(shape.rotated_dim(), model.rotated_dim);
    EXPECT_EQ(shape.experts.count, model.experts);
    EXPECT_EQ(shape.experts.used, model.used);
    int expert_layers = 0, window_layers = 0;
    for (const LayerForm& layer : config.layers) {
      expert_layers += layer.mlp == MlpKind::kExperts ? 1 : 0;
      window_layers += layer.window != 0 ? 1 : 0;
      EXPECT_TRUE(layer.window == 0 || layer.window == model.window) << layer.window;
      EXPECT_TRUE(layer.wide.empty());
    }
    EXPECT_EQ(expert_layers, model.expert_layers);
    EXPECT_EQ(window_layers, model.window_layers);
    EXPECT_EQ(shape.fp8, (model.fp8 ? Fp8Blocks{.rows = 128, .columns = 128} : Fp8Blocks()));
    EXPECT_EQ(shape.fp4_experts, model.fp4);
  }
}

}  // namespace
}  // namespace meshfill
