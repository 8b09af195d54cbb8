// config.json of a small model of each family, and what changes it.
#ifndef MESHFILL_TESTS_ENGINE_MODEL_CONFIG_JSON_H_
#define MESHFILL_TESTS_ENGINE_MODEL_CONFIG_JSON_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "nlohmann/json.hpp"

namespace meshfill {

inline constexpr char kPath[] = "some/config.json";

inline nlohmann::json Base(const std::string& model_type, const std::string& architecture) {
  return {{"architectures", {architecture}},
          {"model_type", model_type},
          {"hidden_size", 64},
          {"intermediate_size", 96},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"vocab_size", 100},
          {"max_position_embeddings", 1024},
          {"rms_norm_eps", 1e-5},
          {"torch_dtype", "bfloat16"},
          {"hidden_act", "silu"}};
}
inline nlohmann::json Llama() { return Base("llama", "LlamaForCausalLM"); }
inline nlohmann::json Mistral() { return Base("mistral", "MistralForCausalLM"); }
inline nlohmann::json Qwen2() { return Base("qwen2", "Qwen2ForCausalLM"); }
inline nlohmann::json Qwen3() { return Base("qwen3", "Qwen3ForCausalLM"); }

inline nlohmann::json With(nlohmann::json config, const nlohmann::json& changes) {
  config.update(changes);
  return config;
}
inline nlohmann::json Without(nlohmann::json config, const std::string& key) {
  config.erase(key);
  return config;
}
inline nlohmann::json Qwen3Moe() {
  return With(Base("qwen3_moe", "Qwen3MoeForCausalLM"),
              {{"num_experts", 5}, {"num_experts_per_tok", 3}, {"moe_intermediate_size", 24}});
}
inline nlohmann::json Glm4Moe() {
  return With(Base("glm4_moe", "Glm4MoeForCausalLM"),
              {{"n_routed_experts", 12}, {"num_experts_per_tok", 3}, {"moe_intermediate_size", 24}});
}
inline nlohmann::json MiniMaxM2() {
  return With(Base("minimax_m2", "MiniMaxM2ForCausalLM"),
              {{"num_local_experts", 5}, {"num_experts_per_tok", 3}, {"rotary_dim", 8}, {"head_dim", 16}});
}

inline nlohmann::json Phi3() { return Base("phi3", "Phi3ForCausalLM"); }

// As the published models have it.
inline nlohmann::json GptOss() {
  nlohmann::json config = Base("gpt_oss", "GptOssForCausalLM");
  config.update({{"num_local_experts", 5},
                 {"num_experts_per_tok", 3},
                 {"experts_per_token", 3},
                 {"initial_context_length", 4096},
                 {"attention_bias", true},
                 {"sliding_window", 128},
                 {"swiglu_limit", 7.0},
                 {"rope_theta", 150000},
                 {"max_position_embeddings", 131072},
                 {"rope_scaling",
                  {{"beta_fast", 32.0},
                   {"beta_slow", 1.0},
                   {"factor", 32.0},
                   {"original_max_position_embeddings", 4096},
                   {"rope_type", "yarn"},
                   {"truncate", false}}}});
  return config;
}

inline nlohmann::json Gemma3() { return Without(Base("gemma3_text", "Gemma3ForCausalLM"), "hidden_act"); }
// As Gemma 3 ships from 4B on.
inline nlohmann::json Gemma3WithImages(const nlohmann::json& text_changes) {
  return {{"architectures", {"Gemma3ForConditionalGeneration"}},
          {"model_type", "gemma3"},
          {"boi_token_index", 255999},
          {"eoi_token_index", 256000},
          {"eos_token_id", {1, 106}},
          {"image_token_index", 262144},
          {"initializer_range", 0.02},
          {"mm_tokens_per_image", 256},
          {"torch_dtype", "bfloat16"},
          {"transformers_version", "4.50.0.dev0"},
          {"text_config", With({{"hidden_size", 2560},
                                {"intermediate_size", 10240},
                                {"model_type", "gemma3_text"},
                                {"num_hidden_layers", 34},
                                {"rope_scaling", {{"factor", 8.0}, {"rope_type", "linear"}}},
                                {"sliding_window", 1024}},
                               text_changes)},
          {"vision_config", {{"hidden_size", 1152}, {"model_type", "siglip_vision_model"}}}};
}

inline nlohmann::json Fp8(const nlohmann::json& changes) {
  nlohmann::json quantisation = {{"quant_method", "fp8"},
                                 {"fmt", "e4m3"},
                                 {"activation_scheme", "dynamic"},
                                 {"weight_block_size", {128, 64}},
                                 {"modules_to_not_convert", {"lm_head", "model.layers.0.mlp.gate"}}};
  quantisation.update(changes);
  return With(Llama(), {{"quantization_config", quantisation}});
}
// As GLM-4.6-FP8 has it.
inline nlohmann::json Compressed(const nlohmann::json& changes, const nlohmann::json& weight_changes) {
  nlohmann::json weights = {{"num_bits", 8},
                            {"type", "float"},
                            {"strategy", "channel"},
                            {"symmetric", true},
                            {"dynamic", false},
                            {"group_size", nullptr},
                            {"block_structure", nullptr},
                            {"actorder", nullptr},
                            {"observer", "minmax"},
                            {"observer_kwargs", nlohmann::json::object()}};
  weights.update(weight_changes);
  const nlohmann::json activations = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}};
  nlohmann::json quantisation = {{"quant_method", "compressed-tensors"},
                                 {"format", "float-quantized"},
                                 {"quantization_status", "compressed"},
                                 {"global_compression_ratio", nullptr},
                                 {"kv_cache_scheme", nullptr},
                                 {"sparsity_config", nlohmann::json::object()},
                                 {"version", "0.12.2"},
                                 {"ignore", {"lm_head"}},
                                 {"config_groups",
                                  {{"group_0",
                                    {{"targets", {"Linear"}},
                                     {"weights", weights},
                                     {"input_activations", activations},
                                     {"output_activations", nullptr}}}}}};
  quantisation.update(changes);
  return With(Llama(), {{"quantization_config", quantisation}});
}
inline nlohmann::json Rope(const nlohmann::json& rope_scaling) {
  return With(Llama(), {{"rope_theta", 500000.0}, {"rope_scaling", rope_scaling}});
}

// Of heads of 16 dimensions.
inline nlohmann::json LongRope() {
  return {{"type", "longrope"},
          {"short_factor", {1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07}},
          {"long_factor", {1.5, 2, 3, 4, 5, 6, 7, 8.25}}};
}
inline nlohmann::json Phi3With(const nlohmann::json& rope, const nlohmann::json& original = 256) {
  return With(Phi3(), {{"rope_scaling", rope}, {"original_max_position_embeddings", original}});
}

inline ModelConfig ParseGood(const nlohmann::json& config) {
  const auto parsed = ModelConfig::Parse(config.dump(), kPath);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.value_or(ModelConfig{});
}

inline std::vector<int64_t> WindowsOf(const ModelConfig& config) {
  std::vector<int64_t> windows;
  for (const LayerForm& layer : config.layers) windows.push_back(layer.window);
  return windows;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_MODEL_CONFIG_JSON_H_
