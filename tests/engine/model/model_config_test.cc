#include "engine/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/model/layer_shape.h"
#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kPath[] = "some/config.json";

json Base(const std::string& model_type, const std::string& architecture) {
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
json Llama() { return Base("llama", "LlamaForCausalLM"); }
json Mistral() { return Base("mistral", "MistralForCausalLM"); }
json Qwen2() { return Base("qwen2", "Qwen2ForCausalLM"); }
json Qwen3() { return Base("qwen3", "Qwen3ForCausalLM"); }

json With(json config, const json& changes) {
  config.update(changes);
  return config;
}
json Without(json config, const std::string& key) {
  config.erase(key);
  return config;
}
json Qwen3Moe() {
  return With(Base("qwen3_moe", "Qwen3MoeForCausalLM"),
              {{"num_experts", 5}, {"num_experts_per_tok", 3}, {"moe_intermediate_size", 24}});
}
json Glm4Moe() {
  return With(Base("glm4_moe", "Glm4MoeForCausalLM"),
              {{"n_routed_experts", 12}, {"num_experts_per_tok", 3}, {"moe_intermediate_size", 24}});
}
json MiniMaxM2() {
  return With(Base("minimax_m2", "MiniMaxM2ForCausalLM"),
              {{"num_local_experts", 5}, {"num_experts_per_tok", 3}, {"rotary_dim", 8}, {"head_dim", 16}});
}

json Phi3() { return Base("phi3", "Phi3ForCausalLM"); }

// As the published models have it.
json GptOss() {
  json config = Base("gpt_oss", "GptOssForCausalLM");
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

json Gemma3() { return Without(Base("gemma3_text", "Gemma3ForCausalLM"), "hidden_act"); }
// As Gemma 3 ships from 4B on.
json Gemma3WithImages(const json& text_changes) {
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

json Fp8(const json& changes) {
  json quantisation = {{"quant_method", "fp8"},
                       {"fmt", "e4m3"},
                       {"activation_scheme", "dynamic"},
                       {"weight_block_size", {128, 64}},
                       {"modules_to_not_convert", {"lm_head", "model.layers.0.mlp.gate"}}};
  quantisation.update(changes);
  return With(Llama(), {{"quantization_config", quantisation}});
}
// As GLM-4.6-FP8 has it.
json Compressed(const json& changes, const json& weight_changes) {
  json weights = {{"num_bits", 8},
                  {"type", "float"},
                  {"strategy", "channel"},
                  {"symmetric", true},
                  {"dynamic", false},
                  {"group_size", nullptr},
                  {"block_structure", nullptr},
                  {"actorder", nullptr},
                  {"observer", "minmax"},
                  {"observer_kwargs", json::object()}};
  weights.update(weight_changes);
  const json activations = {{"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}};
  json quantisation = {{"quant_method", "compressed-tensors"},
                       {"format", "float-quantized"},
                       {"quantization_status", "compressed"},
                       {"global_compression_ratio", nullptr},
                       {"kv_cache_scheme", nullptr},
                       {"sparsity_config", json::object()},
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
json Rope(const json& rope_scaling) {
  return With(Llama(), {{"rope_theta", 500000.0}, {"rope_scaling", rope_scaling}});
}

ModelConfig ParseGood(const json& config) {
  const auto parsed = ModelConfig::Parse(config.dump(), kPath);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.value_or(ModelConfig{});
}

std::vector<int64_t> WindowsOf(const ModelConfig& config) {
  std::vector<int64_t> windows;
  for (const LayerForm& layer : config.layers) windows.push_back(layer.window);
  return windows;
}

TEST(ModelConfigTest, ReadsTheShape) {
  const ModelConfig config = ParseGood(With(Llama(), {{"tie_word_embeddings", true}, {"head_dim", 32}}));
  EXPECT_EQ(config.family, ModelFamily::kLlama);
  EXPECT_EQ(config.shape.layers, 3);
  EXPECT_EQ(config.shape.hidden, 64);
  EXPECT_EQ(config.shape.intermediate, 96);
  EXPECT_EQ(config.shape.q_heads, 4);
  EXPECT_EQ(config.shape.kv_heads, 2);
  EXPECT_EQ(config.shape.head_dim, 32);
  EXPECT_EQ(config.shape.vocab, 100);
  EXPECT_EQ(config.shape.context_tokens, 1024);
  EXPECT_EQ(config.shape.dtype, DType::kBf16);
  EXPECT_EQ(config.norm_eps, 1e-5f);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_THAT(WindowsOf(config), ElementsAre(0, 0, 0));
}

// The values that transformers' configuration classes have where config.json says nothing.
TEST(ModelConfigTest, DefaultsAreTransformers) {
  const auto bare = [](const char* model_type) { return ParseGood(json{{"model_type", model_type}}); };
  const ModelConfig llama = bare("llama"), mistral = bare("mistral"), qwen2 = bare("qwen2"),
                    qwen3 = bare("qwen3");

  EXPECT_EQ(llama.shape.intermediate, 11008);
  EXPECT_EQ(mistral.shape.intermediate, 14336);
  EXPECT_EQ(qwen2.shape.intermediate, 22016);
  EXPECT_EQ(llama.shape.kv_heads, 32);
  EXPECT_EQ(mistral.shape.kv_heads, 8);
  EXPECT_EQ(llama.shape.vocab, 32000);
  EXPECT_EQ(qwen3.shape.vocab, 151936);
  EXPECT_EQ(llama.shape.context_tokens, 2048);
  EXPECT_EQ(mistral.shape.context_tokens, 131072);
  EXPECT_EQ(qwen2.shape.context_tokens, 32768);
  EXPECT_THAT(mistral.shape.kinds, ElementsAre(LayerKind{{.window = 4096}, 32}));
  EXPECT_THAT(qwen2.shape.kinds, ElementsAre(LayerKind{{}, 32}));
  EXPECT_EQ(qwen3.shape.head_dim, 128);
  for (const ModelConfig& config : {llama, mistral, qwen2, qwen3}) {
    EXPECT_EQ(config.shape.layers, 32);
    EXPECT_EQ(config.shape.hidden, 4096);
    EXPECT_EQ(config.shape.head_dim, 128);
    EXPECT_EQ(config.norm_eps, 1e-6f);
    EXPECT_EQ(config.rope.theta, 10000);
    EXPECT_FALSE(config.tied_embeddings);
    EXPECT_EQ(config.shape.dtype, DType::kF32);
  }
}

TEST(ModelConfigTest, FamiliesHaveTheirBiasesAndNorms) {
  const ModelConfig llama = ParseGood(With(Llama(), {{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(llama.qkv_bias && llama.o_bias && llama.mlp_bias && llama.qk_norm == QkNorm::kNone);
  const ModelConfig mistral = ParseGood(With(Mistral(), {{"attention_bias", false}}));
  EXPECT_TRUE(!mistral.qkv_bias && !mistral.o_bias && !mistral.mlp_bias && mistral.qk_norm == QkNorm::kNone);
  const ModelConfig qwen2 = ParseGood(Qwen2());
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.mlp_bias && qwen2.qk_norm == QkNorm::kNone);
  const ModelConfig qwen3 = ParseGood(With(Qwen3(), {{"attention_bias", true}}));
  EXPECT_TRUE(qwen3.qkv_bias && qwen3.o_bias && !qwen3.mlp_bias && qwen3.qk_norm == QkNorm::kHead);
}

TEST(ModelConfigTest, NullStandsForTheDefaultWhereTransformersHasIt) {
  const ModelConfig config = ParseGood(With(Mistral(), {{"num_key_value_heads", nullptr},
                                                        {"head_dim", nullptr},
                                                        {"sliding_window", nullptr},
                                                        {"auto_map", nullptr}}));
  EXPECT_EQ(config.shape.kv_heads, 4);
  EXPECT_EQ(config.shape.head_dim, 16);
  EXPECT_THAT(WindowsOf(config), ElementsAre(0, 0, 0));
}

TEST(ModelConfigTest, SlidingWindows) {
  EXPECT_THAT(WindowsOf(ParseGood(With(Mistral(), {{"sliding_window", 7}}))), ElementsAre(7, 7, 7));
  const json window = {{"sliding_window", 7}, {"max_window_layers", 1}};
  EXPECT_THAT(WindowsOf(ParseGood(With(Qwen2(), window))), ElementsAre(0, 0, 0));
  const ModelConfig qwen2 = ParseGood(With(With(Qwen2(), window), {{"use_sliding_window", true}}));
  EXPECT_THAT(WindowsOf(qwen2), ElementsAre(0, 7, 7));
  EXPECT_THAT(qwen2.shape.kinds, ElementsAre(LayerKind{{}, 1}, LayerKind{{.window = 7}, 2}));
  const json types = {"sliding_attention", "full_attention", "sliding_attention"};
  const ModelConfig qwen3 =
      ParseGood(With(With(Qwen3(), window), {{"use_sliding_window", true}, {"layer_types", types}}));
  EXPECT_THAT(WindowsOf(qwen3), ElementsAre(7, 0, 7));
}

std::vector<bool> ExpertLayers(const ModelConfig& config) {
  std::vector<bool> layers;
  for (const LayerForm& layer : config.layers) layers.push_back(layer.mlp == MlpKind::kExperts);
  return layers;
}

TEST(ModelConfigTest, Experts) {
  const ModelConfig qwen = ParseGood(With(Qwen3Moe(), {{"norm_topk_prob", true}, {"mlp_only_layers", {1}}}));
  EXPECT_EQ(qwen.shape.experts, (ExpertsShape{.count = 5, .used = 3, .width = 24}));
  EXPECT_EQ(qwen.router, (RouterRule{.experts = 5, .used = 3, .normalised = true}));
  EXPECT_THAT(ExpertLayers(qwen), ElementsAre(true, false, true));
  EXPECT_EQ(qwen.qk_norm, QkNorm::kHead);
  EXPECT_THAT(ExpertLayers(ParseGood(With(Qwen3Moe(), {{"decoder_sparse_step", 2}}))),
              ElementsAre(false, true, false));
  EXPECT_THAT(WindowsOf(ParseGood(With(Qwen3Moe(), {{"use_sliding_window", true}, {"sliding_window", 9}}))),
              ElementsAre(9, 9, 9));

  const ModelConfig glm = ParseGood(With(Glm4Moe(), {{"n_group", 4},
                                                     {"topk_group", 2},
                                                     {"n_shared_experts", 2},
                                                     {"routed_scaling_factor", 2.5},
                                                     {"attention_bias", true},
                                                     {"num_nextn_predict_layers", 1}}));
  EXPECT_EQ(glm.shape.experts, (ExpertsShape{.count = 12, .used = 3, .width = 24, .shared_width = 48}));
  EXPECT_EQ(glm.router, (RouterRule{.score = RouterScore::kSigmoid,
                                    .experts = 12,
                                    .used = 3,
                                    .groups = 4,
                                    .used_groups = 2,
                                    .normalised = true,
                                    .scale = 2.5f}));
  EXPECT_THAT(ExpertLayers(glm), ElementsAre(false, true, true));
  EXPECT_TRUE(glm.qkv_bias && !glm.o_bias && glm.router_correction && glm.qk_norm == QkNorm::kNone);
  EXPECT_EQ(glm.shape.rope_dim, 8);  // half of a head
  EXPECT_EQ(glm.unused_layers, 1);

  const ModelConfig minimax = ParseGood(MiniMaxM2());
  EXPECT_EQ(minimax.shape.experts, (ExpertsShape{.count = 5, .used = 3, .width = 96}));
  EXPECT_THAT(ExpertLayers(minimax), ElementsAre(true, true, true));
  EXPECT_EQ(minimax.qk_norm, QkNorm::kHeads);
  EXPECT_EQ(minimax.shape.rope_dim, 8);
}

TEST(ModelConfigTest, ReadsGptOss) {
  const ModelConfig config = ParseGood(GptOss());
  EXPECT_TRUE(config.qkv_bias && config.o_bias && config.expert_bias && config.sinks);
  EXPECT_EQ(config.shape.experts, (ExpertsShape{.count = 5, .used = 3, .width = 96}));
  EXPECT_EQ(config.router, (RouterRule{.experts = 5, .used = 3, .normalised = true}));
  EXPECT_EQ(config.swiglu_clamp.alpha, 1.702f);
  EXPECT_EQ(config.swiglu_clamp.limit, 7);
  EXPECT_THAT(WindowsOf(config), ElementsAre(128, 0, 128));
  EXPECT_EQ(config.rope.scaling, RopeScaling::kYarn);
  EXPECT_FALSE(config.rope.truncate);
  EXPECT_EQ(config.shape.context_tokens, 131072);

  const ModelConfig other =
      ParseGood(With(GptOss(), {{"layer_types", {"full_attention", "sliding_attention", "full_attention"}},
                                {"sliding_window", 33},
                                {"attention_bias", false},
                                {"swiglu_limit", 2.5},
                                {"swiglu_alpha", 1.5}}));
  EXPECT_THAT(WindowsOf(other), ElementsAre(0, 33, 0));
  EXPECT_FALSE(other.qkv_bias || other.o_bias);
  EXPECT_EQ(other.swiglu_clamp.alpha, 1.5f);
  EXPECT_EQ(other.swiglu_clamp.limit, 2.5f);
}

// As the published models have it, which state no dtype.
TEST(ModelConfigTest, ReadsGptOssInMxfp4) {
  const json quantisation = {
      {"quant_method", "mxfp4"},
      {"modules_to_not_convert",
       {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
  const ModelConfig config =
      ParseGood(Without(With(GptOss(), {{"quantization_config", quantisation}}), "torch_dtype"));
  EXPECT_TRUE(config.shape.fp4_experts);
  EXPECT_EQ(config.shape.dtype, DType::kBf16);
  EXPECT_EQ(config.shape.fp8, Fp8Blocks());
  EXPECT_FALSE(ParseGood(GptOss()).shape.fp4_experts);
}

// The sizes of published models, and the billions of parameters that their authors state: in all, and of
// those that a token uses (without embedding and LM head).
TEST(ModelConfigTest, PublishedModelsHaveTheirParameters) {
  const auto sizes = [](int64_t hidden, int layers, int heads, int kv_heads, int64_t vocab) {
    return json{{"hidden_size", hidden},
                {"num_hidden_layers", layers},
                {"num_attention_heads", heads},
                {"num_key_value_heads", kv_heads},
                {"head_dim", 128},
                {"vocab_size", vocab}};
  };
  const struct {
    const char* name;
    json config;
    double parameters, used;
  } models[] = {
      {"Qwen3-30B-A3B",
       With(With(Qwen3Moe(), sizes(2048, 48, 32, 4, 151936)),
            {{"num_experts", 128}, {"num_experts_per_tok", 8}, {"moe_intermediate_size", 768}}),
       30.5e9, 2.7e9},
      {"Qwen3-235B-A22B",
       With(With(Qwen3Moe(), sizes(4096, 94, 64, 4, 151936)),
            {{"num_experts", 128}, {"num_experts_per_tok", 8}, {"moe_intermediate_size", 1536}}),
       235e9, 21e9},
      {"Mixtral-8x7B",
       With(With(Base("mixtral", "MixtralForCausalLM"), sizes(4096, 32, 32, 8, 32000)),
            {{"num_local_experts", 8}, {"num_experts_per_tok", 2}, {"intermediate_size", 14336}}),
       46.7e9, 12.6e9},
      {"GLM-4.5-Air",
       With(With(Glm4Moe(), sizes(4096, 46, 96, 8, 151552)), {{"n_routed_experts", 128},
                                                              {"num_experts_per_tok", 8},
                                                              {"moe_intermediate_size", 1408},
                                                              {"intermediate_size", 10944}}),
       106.9e9, 12.2e9},
      {"MiniMax-M2",
       With(With(MiniMaxM2(), sizes(3072, 62, 48, 8, 200064)), {{"num_local_experts", 256},
                                                                {"num_experts_per_tok", 8},
                                                                {"intermediate_size", 1536},
                                                                {"rotary_dim", 64}}),
       228.7e9, 9.8e9},
      {"gpt-oss-20b",
       With(With(GptOss(), sizes(2880, 24, 64, 8, 201088)), {{"head_dim", 64},
                                                             {"num_local_experts", 32},
                                                             {"num_experts_per_tok", 4},
                                                             {"experts_per_token", 4},
                                                             {"intermediate_size", 2880}}),
       20.9e9, 3.03e9},
      {"gpt-oss-120b",
       With(With(GptOss(), sizes(2880, 36, 64, 8, 201088)), {{"head_dim", 64},
                                                             {"num_local_experts", 128},
                                                             {"num_experts_per_tok", 4},
                                                             {"experts_per_token", 4},
                                                             {"intermediate_size", 2880}}),
       116.8e9, 4.55e9},
      // Their 27.0e9 are without what reads images, and with one of the two tables.
      {"Gemma 3 27B",
       Gemma3WithImages({{"hidden_size", 5376},
                         {"intermediate_size", 21504},
                         {"num_attention_heads", 32},
                         {"num_key_value_heads", 16},
                         {"head_dim", 128},
                         {"num_hidden_layers", 62},
                         {"query_pre_attn_scalar", 168}}),
       28.4e9, 25.6e9},
  };
  for (const auto& [name, config, parameters, used] : models) {
    SCOPED_TRACE(name);
    const ModelShape shape = ParseGood(config).shape;
    const auto tables = static_cast<double>(2 * shape.vocab * shape.hidden);
    EXPECT_NEAR((static_cast<double>(LayersMatrixElements(shape)) + tables) / parameters, 1, 0.01);
    EXPECT_NEAR(ProjectionFlopsPerToken(shape) / 2 / used, 1, 0.02);  // they round it
  }
}

TEST(ModelConfigTest, DTypeInOldAndNewSpelling) {
  EXPECT_EQ(ParseGood(With(Llama(), {{"torch_dtype", "float16"}})).shape.dtype, DType::kF16);
  EXPECT_EQ(ParseGood(With(Llama(), {{"dtype", "float32"}})).shape.dtype, DType::kF32);
}

TEST(ModelConfigTest, ReadsPhi3AndPhi4) {
  const ModelConfig plain = ParseGood(With(Phi3(), {{"original_max_position_embeddings", 1024},
                                                    {"embd_pdrop", 0.0},
                                                    {"resid_pdrop", 0.0},
                                                    {"rope_scaling", nullptr},
                                                    {"sliding_window", nullptr},
                                                    {"auto_map", {{"AutoConfig", "x"}}}}));
  EXPECT_TRUE(plain.fused_projections);
  EXPECT_THAT(WindowsOf(plain), ElementsAre(0, 0, 0));
  EXPECT_EQ(plain.shape.rope_dim, 0);
  const ModelConfig windowed =
      ParseGood(With(Phi3(), {{"sliding_window", 47}, {"partial_rotary_factor", 0.75}}));
  EXPECT_THAT(WindowsOf(windowed), ElementsAre(47, 47, 47));
  EXPECT_EQ(windowed.shape.rope_dim, 12);
  EXPECT_FALSE(ParseGood(Llama()).fused_projections);
}

// Of heads of 16 dimensions.
json LongRope() {
  return {{"type", "longrope"},
          {"short_factor", {1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07}},
          {"long_factor", {1.5, 2, 3, 4, 5, 6, 7, 8.25}}};
}
json Phi3With(const json& rope, const json& original = 256) {
  return With(Phi3(), {{"rope_scaling", rope}, {"original_max_position_embeddings", original}});
}

TEST(ModelConfigTest, ReadsLongRope) {
  const ModelConfig config = ParseGood(Phi3With(LongRope()));
  EXPECT_EQ(config.rope.scaling, RopeScaling::kLongRope);
  EXPECT_THAT(config.rope.short_factors, ElementsAre(1, 1.01f, 1.02f, 1.03f, 1.04f, 1.05f, 1.06f, 1.07f));
  EXPECT_THAT(config.rope.long_factors, ElementsAre(1.5f, 2, 3, 4, 5, 6, 7, 8.25f));
  EXPECT_NEAR(config.rope.attention_factor, std::sqrt(1 + std::log(1024.0 / 256) / std::log(256.0)), 1e-12);
  EXPECT_EQ(config.shape.context_tokens, 1024);
  EXPECT_EQ(config.shape.long_rope_after, 256);
  EXPECT_FALSE(config.shape.HasLongRope(256));
  EXPECT_TRUE(config.shape.HasLongRope(257));

  const json stated = With(LongRope(), {{"factor", 16.0}, {"original_max_position_embeddings", 256}});
  EXPECT_NEAR(ParseGood(Phi3With(stated)).rope.attention_factor,
              std::sqrt(1 + std::log(16.0) / std::log(256.0)), 1e-12);
  EXPECT_EQ(ParseGood(Phi3With(With(stated, {{"attention_factor", 1.5}}))).rope.attention_factor, 1.5);
  EXPECT_EQ(ParseGood(Phi3With(LongRope(), 1024)).rope.attention_factor, 1);  // nothing is stretched
  EXPECT_EQ(ParseGood(Phi3With(With(LongRope(), {{"type", "su"}}))).shape.long_rope_after, 256);
  const json partial = {{"rope_type", "longrope"}, {"short_factor", {1, 1}}, {"long_factor", {2, 3}}};
  EXPECT_EQ(ParseGood(With(Phi3With(partial), {{"partial_rotary_factor", 0.25}})).shape.rope_dim, 4);

  EXPECT_EQ(
      ParseGood(Rope(With(LongRope(), {{"original_max_position_embeddings", 64}}))).shape.long_rope_after,
      64);
  EXPECT_EQ(ParseGood(Phi3()).shape.long_rope_after, 0);
  EXPECT_FALSE(ParseGood(Phi3()).shape.HasLongRope(1024));
}

std::vector<bool> LocalRopes(const ModelConfig& config) {
  std::vector<bool> local;
  for (const LayerForm& layer : config.layers) local.push_back(layer.rope == LayerRope::kLocal);
  return local;
}

TEST(ModelConfigTest, ReadsGemma3) {
  const ModelConfig plain = ParseGood(With(Gemma3(), {{"sliding_window_pattern", 2},
                                                      {"query_pre_attn_scalar", 168},
                                                      {"hidden_activation", "gelu_pytorch_tanh"},
                                                      {"attn_logit_softcapping", nullptr},
                                                      {"final_logit_softcapping", nullptr},
                                                      {"cache_implementation", "hybrid"},
                                                      {"sliding_window", 7}}));
  EXPECT_EQ(plain.family, ModelFamily::kGemma3);
  EXPECT_EQ(plain.shape.head_dim, 256);
  EXPECT_EQ(plain.shape.activation, Activation::kGelu);
  EXPECT_TRUE(plain.shape.post_norms && plain.tied_embeddings && plain.qk_norm == QkNorm::kHead);
  EXPECT_FALSE(plain.qkv_bias || plain.o_bias || plain.mlp_bias || plain.inside_another);
  EXPECT_EQ(plain.shape.score_scale(), 1 / std::sqrt(168.0f));
  EXPECT_EQ(plain.embedding_scale, 8);
  EXPECT_EQ(plain.norm_offset, 1);
  EXPECT_EQ(plain.rope.theta, 1e6);
  EXPECT_EQ(plain.local_rope.theta, 1e4);
  EXPECT_THAT(WindowsOf(plain), ElementsAre(7, 0, 7));
  EXPECT_THAT(LocalRopes(plain), ElementsAre(true, false, true));
  EXPECT_EQ(plain.shape.rope_count(), 2);

  const ModelConfig biased =
      ParseGood(With(Gemma3(), {{"attention_bias", true},
                                {"tie_word_embeddings", false},
                                {"layer_types", {"full_attention", "sliding_attention", "full_attention"}},
                                {"sliding_window", 9},
                                {"hidden_act", "silu"}}));  // which transformers does not read in this family
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias);
  EXPECT_FALSE(biased.tied_embeddings);
  EXPECT_THAT(WindowsOf(biased), ElementsAre(0, 9, 0));
  EXPECT_EQ(biased.shape.score_scale(), 1 / 16.0f);

  const ModelConfig all_local = ParseGood(Gemma3());
  EXPECT_THAT(WindowsOf(all_local), ElementsAre(4096, 4096, 4096));  // the sixth would see all
  EXPECT_EQ(all_local.shape.rope_count(), 1);
}

TEST(ModelConfigTest, Gemma3HasTwoRopesInOldAndNewSpelling) {
  const ModelConfig old_spelling =
      ParseGood(With(Gemma3(), {{"rope_theta", 5e5},
                                {"rope_local_base_freq", 2e4},
                                {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}}));
  const json by_type = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 5e5}}},
                        {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 2e4}}}};
  const ModelConfig new_spelling = ParseGood(With(Gemma3(), {{"rope_parameters", by_type}}));
  for (const ModelConfig& config : {old_spelling, new_spelling}) {
    EXPECT_EQ(config.RopeOf(LayerRope::kMain).theta, 5e5);
    EXPECT_EQ(config.RopeOf(LayerRope::kMain).scaling, RopeScaling::kLinear);
    EXPECT_EQ(config.RopeOf(LayerRope::kMain).factor, 8);
    EXPECT_EQ(config.RopeOf(LayerRope::kLocal).theta, 2e4);
    EXPECT_EQ(config.RopeOf(LayerRope::kLocal).scaling, RopeScaling::kNone);
    EXPECT_EQ(config.shape.context_tokens, 1024);
  }
  const ModelConfig one_type =
      ParseGood(With(Gemma3(), {{"rope_parameters", Without(by_type, "full_attention")}}));
  EXPECT_EQ(one_type.rope.theta, 1e6);
  EXPECT_EQ(one_type.rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(one_type.local_rope.theta, 2e4);
}

TEST(ModelConfigTest, ReadsTheLanguageModelInsideAnother) {
  const ModelConfig config = ParseGood(Gemma3WithImages(json::object()));
  EXPECT_TRUE(config.inside_another && config.tied_embeddings);
  EXPECT_EQ(config.family, ModelFamily::kGemma3);
  EXPECT_EQ(config.shape.layers, 34);
  EXPECT_EQ(config.shape.hidden, 2560);
  EXPECT_EQ(config.shape.vocab, 262208);
  EXPECT_EQ(config.shape.context_tokens, 131072);
  EXPECT_EQ(config.shape.dtype, DType::kBf16);
  EXPECT_EQ(config.rope.factor, 8);
  EXPECT_THAT(config.shape.kinds,
              ElementsAre(LayerKind{{}, 5}, LayerKind{{.window = 1024, .rope = LayerRope::kLocal}, 29}));
  EXPECT_TRUE(ParseGood(Without(Gemma3WithImages(json::object()), "architectures")).inside_another);
}

TEST(ModelConfigTest, ReadsWhereTheScalesOfFp8Are) {
  const ModelConfig wide = ParseGood(Llama());
  EXPECT_EQ(wide.fp8.scales, nullptr);
  EXPECT_EQ(wide.shape.fp8, Fp8Blocks());

  const ModelConfig blocks = ParseGood(Fp8(json::object()));
  EXPECT_STREQ(blocks.fp8.scales, "weight_scale_inv");
  EXPECT_EQ(blocks.fp8.blocks, (Fp8Blocks{.rows = 128, .columns = 64}));
  EXPECT_EQ(blocks.shape.fp8, blocks.fp8.blocks);
  EXPECT_EQ(blocks.shape.dtype, DType::kBf16);

  const ModelConfig channels = ParseGood(Compressed(json::object(), json::object()));
  EXPECT_STREQ(channels.fp8.scales, "weight_scale");
  EXPECT_EQ(channels.fp8.blocks, (Fp8Blocks{.rows = 1, .columns = Fp8Blocks::kAll}));
  const json of_blocks = {{"strategy", "block"}, {"block_structure", {128, 128}}};
  EXPECT_EQ(ParseGood(Compressed(json::object(), of_blocks)).fp8.blocks,
            (Fp8Blocks{.rows = 128, .columns = 128}));
  EXPECT_EQ(ParseGood(Compressed(json::object(), {{"strategy", "tensor"}})).fp8.blocks,
            (Fp8Blocks{.rows = Fp8Blocks::kAll, .columns = Fp8Blocks::kAll}));

  // Where some of the layers' matrices are wide, all are counted so: rather too much memory than too little.
  const ModelConfig some = ParseGood(Fp8({{"modules_to_not_convert", {"model.layers.0.self_attn.q_proj"}}}));
  EXPECT_EQ(some.fp8.blocks, blocks.fp8.blocks);
  EXPECT_EQ(some.shape.fp8, Fp8Blocks());
}

TEST(ModelConfigTest, RopeInOldAndNewSpelling) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 512}};
  const ModelConfig old_spelling = ParseGood(Rope(llama3));
  const ModelConfig new_spelling =
      ParseGood(With(Llama(), {{"rope_parameters", With(llama3, {{"rope_theta", 500000.0}})}}));
  for (const ModelConfig& config : {old_spelling, new_spelling}) {
    EXPECT_EQ(config.rope.scaling, RopeScaling::kLlama3);
    EXPECT_EQ(config.rope.theta, 500000);
    EXPECT_EQ(config.rope.factor, 8);
    EXPECT_EQ(config.rope.low_freq_factor, 1);
    EXPECT_EQ(config.rope.high_freq_factor, 4);
    EXPECT_EQ(config.rope.original_context_tokens, 512);
    EXPECT_EQ(config.rope.attention_factor, 1);
    EXPECT_EQ(config.shape.context_tokens, 1024);
  }
  const ModelConfig linear = ParseGood(Rope({{"type", "linear"}, {"factor", 2}}));
  EXPECT_EQ(linear.rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(linear.rope.factor, 2);
  EXPECT_EQ(ParseGood(Rope(nullptr)).rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(ParseGood(Rope({{"rope_type", "default"}})).rope.scaling, RopeScaling::kNone);
}

TEST(ModelConfigTest, YarnExtendsTheContext) {
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 1024}};
  const ModelConfig config = ParseGood(Rope(yarn));
  EXPECT_EQ(config.rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(config.shape.context_tokens, 4096);
  EXPECT_NEAR(config.rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  EXPECT_EQ(config.rope.beta_fast, 32);
  EXPECT_EQ(config.rope.beta_slow, 1);
  EXPECT_TRUE(config.rope.truncate);

  EXPECT_EQ(ParseGood(Rope(With(yarn, {{"original_max_position_embeddings", 64}}))).shape.context_tokens,
            1024);
  EXPECT_EQ(ParseGood(Rope(With(yarn, {{"attention_factor", 1.5}}))).rope.attention_factor, 1.5);
  EXPECT_NEAR(ParseGood(Rope(With(yarn, {{"mscale", 1.0}, {"mscale_all_dim", 0.5}}))).rope.attention_factor,
              (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1), 1e-12);
  const ModelConfig derived =
      ParseGood(Rope({{"type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 256}}));
  EXPECT_EQ(derived.rope.factor, 4);  // max_position_embeddings / original
}

struct BadConfig {
  std::string what;
  json config;
  std::vector<std::string> named;
};

std::vector<BadConfig> BadConfigs() {
  const json llama3 = {
      {"rope_type", "llama3"}, {"factor", 8.0}, {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}};
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  const json windowed = With(Qwen2(), {{"use_sliding_window", true}, {"sliding_window", 8}});
  return {
      {"unknown key", With(Llama(), {{"num_experts", 8}}), {"\"num_experts\"", "8"}},
      {"longrope with too few factors",
       Phi3With(With(LongRope(), {{"long_factor", {1.5, 2}}})),
       {"\"rope_scaling.long_factor\"", "8 numbers", "16 dimensions"}},
      {"longrope with too many factors",
       Phi3With(With(LongRope(), {{"short_factor", std::vector<double>(9, 1.0)}})),
       {"\"rope_scaling.short_factor\"", "8 numbers"}},
      {"longrope with factors for the dimensions that are not rotated",
       With(Phi3With(LongRope()), {{"partial_rotary_factor", 0.5}}),
       {"\"rope_scaling.short_factor\"", "4 numbers", "8 dimensions"}},
      {"longrope with a factor of 0",
       Phi3With(With(LongRope(), {{"short_factor", {1, 1, 0, 1, 1, 1, 1, 1}}})),
       {"\"rope_scaling.short_factor\"", "number 2 is 0", "0.001"}},
      {"longrope with a negative factor",
       Phi3With(With(LongRope(), {{"long_factor", {1, 1, 1, 1, 1, 1, 1, -2}}})),
       {"\"rope_scaling.long_factor\"", "number 7 is -2"}},
      {"longrope with a factor that is no number",
       Phi3With(With(LongRope(), {{"long_factor", {1, 1, 1, 1, 1, 1, 1, "2"}}})),
       {"\"rope_scaling.long_factor\"", "8 numbers"}},
      {"longrope with one factor for all",
       Phi3With(With(LongRope(), {{"short_factor", 1.5}})),
       {"\"rope_scaling.short_factor\"", "1.5", "8 numbers"}},
      {"longrope without long factors",
       Phi3With(Without(LongRope(), "long_factor")),
       {"\"rope_scaling.long_factor\"", "missing"}},
      {"Phi-3 with longrope, without its original context",
       With(Phi3(), {{"rope_scaling", LongRope()}}),
       {"\"original_max_position_embeddings\"", "missing", "longrope"}},
      {"Phi-3 with an original context where transformers does not read it",
       With(Phi3(), {{"rope_scaling", With(LongRope(), {{"original_max_position_embeddings", 256}})}}),
       {"\"original_max_position_embeddings\"", "missing"}},
      {"longrope without its original context",
       Rope(LongRope()),
       {"\"rope_scaling.original_max_position_embeddings\"", "missing"}},
      {"longrope with two original contexts",
       Phi3With(With(LongRope(), {{"original_max_position_embeddings", 128}})),
       {"\"rope_scaling.original_max_position_embeddings\"", "another"}},
      {"longrope with an original context of one token",
       Phi3With(LongRope(), 1),
       {"\"original_max_position_embeddings\"", "2"}},
      {"longrope with mscales",
       Phi3With(With(LongRope(), {{"short_mscale", 1.2}})),
       {"\"rope_scaling.short_mscale\""}},
      {"Gemma 3 with longrope",
       With(Gemma3(), {{"rope_scaling", With(LongRope(), {{"original_max_position_embeddings", 64}})}}),
       {"\"rope_scaling.type\"", "longrope", "all"}},
      {"Phi-3 with yarn, which is longrope there",
       With(Phi3(), {{"rope_parameters", {{"rope_type", "yarn"}, {"factor", 4.0}}}}),
       {"\"rope_parameters\"", "yarn"}},
      {"Phi-3 with linear RoPE",
       With(Phi3(), {{"rope_scaling", {{"type", "linear"}, {"factor", 4.0}}}}),
       {"\"rope_scaling\"", "linear", "longrope"}},
      {"Phi-3 with a bias", With(Phi3(), {{"lm_head_bias", true}}), {"\"lm_head_bias\"", "true"}},
      {"quantised otherwise",
       With(Llama(), {{"quantization_config", {{"quant_method", "gptq"}, {"bits", 4}}}}),
       {"\"quantization_config.quant_method\"", "gptq", "fp8", "compressed-tensors"}},
      {"quantised somehow",
       With(Llama(), {{"quantization_config", {{"bits", 4}}}}),
       {"\"quantization_config.quant_method\" is absent"}},
      {"quantised by text", With(Llama(), {{"quantization_config", "fp8"}}), {"\"quantization_config\""}},
      {"FP8 of another kind", Fp8({{"fmt", "e5m2"}}), {"\"quantization_config.fmt\"", "e5m2"}},
      {"FP8 activations measured ahead",
       Fp8({{"activation_scheme", "static"}}),
       {"\"quantization_config.activation_scheme\"", "static"}},
      {"FP8 without blocks",
       Fp8({{"weight_block_size", nullptr}}),
       {"\"quantization_config.weight_block_size\"", "missing"}},
      {"FP8 in blocks of none",
       Fp8({{"weight_block_size", {128, 0}}}),
       {"\"quantization_config.weight_block_size\"", "[128,0]"}},
      {"FP8 with an unknown key", Fp8({{"zeros", 1}}), {"\"quantization_config.zeros\""}},
      {"FP8 but for a number",
       Fp8({{"modules_to_not_convert", {1}}}),
       {"\"quantization_config.modules_to_not_convert\""}},
      {"compressed to integers",
       Compressed(json::object(), {{"type", "int"}}),
       {"\"quantization_config.config_groups.weights.type\"", "int"}},
      {"compressed to four bits",
       Compressed(json::object(), {{"num_bits", 4}}),
       {"\"quantization_config.config_groups.weights.num_bits\"", "4"}},
      {"compressed in groups",
       Compressed(json::object(), {{"strategy", "group"}, {"group_size", 128}}),
       {"\"quantization_config.config_groups.weights.group_size\"", "128"}},
      {"compressed by another strategy",
       Compressed(json::object(), {{"strategy", "attn_head"}}),
       {"\"quantization_config.config_groups.weights.strategy\"", "attn_head"}},
      {"compressed in another format",
       Compressed({{"format", "pack-quantized"}}, json::object()),
       {"\"quantization_config.format\"", "pack-quantized"}},
      {"compressed K and V",
       Compressed({{"kv_cache_scheme", {{"num_bits", 8}}}}, json::object()),
       {"\"quantization_config.kv_cache_scheme\""}},
      {"compressed and sparse",
       Compressed({{"sparsity_config", {{"format", "sparse-bitmask"}}}}, json::object()),
       {"\"quantization_config.sparsity_config\""}},
      {"compressed in no group",
       Compressed({{"config_groups", json::object()}}, json::object()),
       {"\"quantization_config.config_groups\""}},
      {"window in Llama", With(Llama(), {{"sliding_window", 8}}), {"\"sliding_window\"", "8"}},
      {"no architecture",
       Without(Without(Llama(), "architectures"), "model_type"),
       {"\"architectures\"", "Qwen3ForCausalLM"}},
      {"other architecture",
       With(Llama(), {{"architectures", {"GemmaForCausalLM"}}}),
       {"\"architectures\"", "Gemma"}},
      {"two architectures",
       With(Llama(), {{"architectures", {"LlamaForCausalLM", "X"}}}),
       {"\"architectures\""}},
      {"headless model",
       With(Llama(), {{"architectures", {"LlamaModel"}}}),
       {"\"architectures\"", "LlamaModel"}},
      {"model_type of another", With(Llama(), {{"model_type", "qwen2"}}), {"\"model_type\"", "qwen2"}},
      {"other model_type", json{{"model_type", "gpt2"}}, {"\"model_type\"", "gpt2"}},
      {"other activation", With(Llama(), {{"hidden_act", "gelu"}}), {"\"hidden_act\"", "gelu"}},
      {"other dtype",
       With(Llama(), {{"torch_dtype", "float8_e4m3fn"}}),
       {"\"torch_dtype\"", "float8_e4m3fn"}},
      {"dtype no string", With(Llama(), {{"dtype", 16}}), {"\"dtype\"", "16"}},
      {"no layers", With(Llama(), {{"num_hidden_layers", 0}}), {"\"num_hidden_layers\"", "0", "1024"}},
      {"too many layers", With(Llama(), {{"num_hidden_layers", 1025}}), {"\"num_hidden_layers\"", "1025"}},
      {"negative hidden", With(Llama(), {{"hidden_size", -64}}), {"\"hidden_size\"", "-64"}},
      {"huge hidden",
       With(Llama(), {{"hidden_size", uint64_t{1} << 63}}),
       {"\"hidden_size\"", "9223372036854775808"}},
      {"fractional hidden", With(Llama(), {{"hidden_size", 64.5}}), {"\"hidden_size\"", "64.5"}},
      {"hidden as text", With(Llama(), {{"hidden_size", "64"}}), {"\"hidden_size\"", "\"64\""}},
      {"hidden null", With(Llama(), {{"hidden_size", nullptr}}), {"\"hidden_size\"", "null"}},
      {"huge vocabulary", With(Llama(), {{"vocab_size", 1 << 25}}), {"\"vocab_size\""}},
      {"huge context",
       With(Llama(), {{"max_position_embeddings", int64_t{1} << 31}}),
       {"\"max_position_embeddings\""}},
      {"KV heads that do not divide",
       With(Llama(), {{"num_key_value_heads", 3}}),
       {"\"num_key_value_heads\"", "3", "4"}},
      {"more KV heads than Q heads",
       With(Llama(), {{"num_key_value_heads", 8}}),
       {"\"num_key_value_heads\"", "8"}},
      {"odd head_dim", With(Llama(), {{"head_dim", 33}}), {"\"head_dim\"", "33"}},
      {"head_dim above 256", With(Llama(), {{"head_dim", 258}}), {"\"head_dim\"", "258"}},
      {"derived head_dim above 256", With(Llama(), {{"hidden_size", 4096}}), {"\"head_dim\"", "1024"}},
      {"heads that do not divide hidden", With(Llama(), {{"hidden_size", 66}}), {"\"head_dim\"", "66"}},
      {"epsilon of zero", With(Llama(), {{"rms_norm_eps", 0}}), {"\"rms_norm_eps\"", "0"}},
      {"tied as a number", With(Llama(), {{"tie_word_embeddings", 1}}), {"\"tie_word_embeddings\"", "1"}},
      {"bias in Mistral", With(Mistral(), {{"attention_bias", true}}), {"\"attention_bias\"", "true"}},
      {"no bias in Qwen2", With(Qwen2(), {{"attention_bias", false}}), {"\"attention_bias\"", "false"}},
      {"MLP bias in Qwen3", With(Qwen3(), {{"mlp_bias", true}}), {"\"mlp_bias\"", "true"}},
      {"sliced projections", With(Llama(), {{"pretraining_tp", 2}}), {"\"pretraining_tp\"", "2"}},
      {"encoder and decoder", With(Llama(), {{"is_encoder_decoder", true}}), {"\"is_encoder_decoder\""}},
      {"multimodal rope", With(Qwen2(), {{"use_mrope", true}}), {"\"use_mrope\""}},
      {"capped scores",
       With(Gemma3(), {{"attn_logit_softcapping", 50.0}}),
       {"\"attn_logit_softcapping\"", "50.0"}},
      {"capped logits",
       With(Gemma3(), {{"final_logit_softcapping", 30.0}}),
       {"\"final_logit_softcapping\"", "30.0"}},
      {"attention to both sides",
       With(Gemma3(), {{"use_bidirectional_attention", true}}),
       {"\"use_bidirectional_attention\""}},
      {"other activation in Gemma",
       With(Gemma3(), {{"hidden_activation", "gelu"}}),
       {"\"hidden_activation\"", "\"gelu\""}},
      {"scores divided by nothing",
       With(Gemma3(), {{"query_pre_attn_scalar", 0}}),
       {"\"query_pre_attn_scalar\"", "0"}},
      {"Gemma without a window",
       With(Gemma3(), {{"sliding_window", nullptr}}),
       {"\"sliding_window\"", "null"}},
      {"a pattern of no layers",
       With(Gemma3(), {{"sliding_window_pattern", 0}}),
       {"\"sliding_window_pattern\"", "0"}},
      {"local theta of one",
       With(Gemma3(), {{"rope_local_base_freq", 1}}),
       {"\"rope_local_base_freq\"", "1"}},
      {"local theta in Llama", With(Llama(), {{"rope_local_base_freq", 1e4}}), {"\"rope_local_base_freq\""}},
      {"rope by layer type in Llama",
       With(Llama(), {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}}),
       {"\"rope_parameters.full_attention\""}},
      {"one rope for two layer types",
       With(Gemma3(), {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 8.0}}}}),
       {"\"rope_parameters\"", "sliding_attention"}},
      {"rope of another layer type",
       With(Gemma3(), {{"rope_parameters", {{"full_attention", json::object()}, {"linear_attention", 1}}}}),
       {"\"rope_parameters.linear_attention\""}},
      {"rope of a layer type no object",
       With(Gemma3(), {{"rope_parameters", {{"sliding_attention", 1e4}}}}),
       {"\"rope_parameters.sliding_attention\"", "10000.0"}},
      {"rope of a layer type of another kind",
       With(Gemma3(), {{"rope_parameters", {{"full_attention", {{"rope_type", "longrope"}}}}}}),
       {"\"rope_parameters.full_attention.rope_type\"", "longrope"}},
      {"both spellings of two ropes",
       With(Gemma3(), {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}},
                       {"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}}),
       {"\"rope_scaling\""}},
      {"language model without a config",
       Without(Gemma3WithImages(json::object()), "text_config"),
       {"\"text_config\"", "missing"}},
      {"language model no object",
       With(Gemma3WithImages(json::object()), {{"text_config", 1}}),
       {"\"text_config\"", "1"}},
      {"language model of another kind",
       Gemma3WithImages({{"model_type", "llama"}}),
       {"\"text_config.model_type\"", "llama", "gemma3_text"}},
      {"language model with an unknown key", Gemma3WithImages({{"altup", 1}}), {"text_config", "\"altup\""}},
      {"unknown key around a language model",
       With(Gemma3WithImages(json::object()), {{"audio_config", {{"x", 1}}}}),
       {"\"audio_config\""}},
      {"tied and not tied",
       With(Gemma3WithImages({{"tie_word_embeddings", false}}), {{"tie_word_embeddings", true}}),
       {"\"tie_word_embeddings\"", "text_config"}},
      {"window of nothing", With(Mistral(), {{"sliding_window", 0}}), {"\"sliding_window\"", "0"}},
      {"too few layer types",
       With(windowed, {{"layer_types", {"full_attention"}}}),
       {"\"layer_types\"", "3"}},
      {"unknown layer type",
       With(windowed, {{"layer_types", {"full_attention", "full_attention", "linear_attention"}}}),
       {"\"layer_types\"", "linear_attention"}},
      {"sliding layer without a window",
       With(Qwen2(), {{"layer_types", {"full_attention", "full_attention", "sliding_attention"}}}),
       {"\"layer_types\""}},
      {"mixed layers in Mistral",
       With(Mistral(), {{"layer_types", {"full_attention", "sliding_attention", "sliding_attention"}}}),
       {"\"layer_types\""}},
      {"layer_types no array", With(Qwen2(), {{"layer_types", "full_attention"}}), {"\"layer_types\""}},
      {"rope of another kind", Rope({{"rope_type", "ntk"}}), {"\"rope_scaling.rope_type\"", "ntk", "longrope"}},
      {"dynamic rope, old key",
       Rope({{"type", "dynamic"}, {"factor", 2.0}}),
       {"\"rope_scaling.type\"", "dynamic"}},
      {"two kinds of rope",
       Rope({{"type", "linear"}, {"rope_type", "yarn"}, {"factor", 2.0}}),
       {"\"rope_scaling.type\""}},
      {"rope no object", Rope(2.0), {"\"rope_scaling\"", "2.0"}},
      {"both spellings that disagree",
       With(Rope({{"type", "linear"}, {"factor", 2.0}}), {{"rope_parameters", {{"rope_type", "default"}}}}),
       {"\"rope_parameters\"", "rope_scaling"}},
      {"two thetas", Rope({{"rope_type", "default"}, {"rope_theta", 1e4}}), {"\"rope_scaling.rope_theta\""}},
      {"theta of one", With(Llama(), {{"rope_theta", 1}}), {"\"rope_theta\"", "1"}},
      {"no experts", With(Qwen3Moe(), {{"num_experts", 0}}), {"\"num_experts\"", "0"}},
      {"more experts used than there are",
       With(Qwen3Moe(), {{"num_experts_per_tok", 6}}),
       {"\"num_experts_per_tok\"", "6", "5 experts"}},
      {"more of gpt-oss's experts used than there are",
       With(GptOss(), {{"num_experts_per_tok", 6}, {"experts_per_token", 6}}),
       {"\"num_experts_per_tok\"", "6", "5 experts"}},
      {"two numbers of used experts",
       With(GptOss(), {{"experts_per_token", 2}}),
       {"\"experts_per_token\"", "2"}},
      {"mxfp4 in Llama",
       With(Llama(), {{"quantization_config", {{"quant_method", "mxfp4"}}}}),
       {"\"quantization_config.quant_method\"", "mxfp4"}},
      {"mxfp4 of another size",
       With(GptOss(), {{"quantization_config", {{"quant_method", "mxfp4"}}}, {"intermediate_size", 80}}),
       {"\"intermediate_size\"", "80", "32"}},
      {"mxfp4 of another kind",
       With(GptOss(), {{"quantization_config", {{"quant_method", "mxfp4"}, {"bits", 3}}}}),
       {"quantization_config.bits"}},
      {"gpt-oss without a rope", Without(GptOss(), "rope_scaling"), {"\"rope_scaling\"", "missing"}},
      {"no limit of a gate", With(GptOss(), {{"swiglu_limit", 0}}), {"\"swiglu_limit\"", "0"}},
      {"a dense MLP with a bias, of none", With(GptOss(), {{"mlp_bias", true}}), {"\"mlp_bias\""}},
      {"dense layer that is not there",
       With(Qwen3Moe(), {{"mlp_only_layers", {3}}}),
       {"\"mlp_only_layers\"", "3"}},
      {"groups of unequal size", With(Glm4Moe(), {{"n_group", 5}}), {"\"n_group\"", "12"}},
      {"groups of one expert", With(Glm4Moe(), {{"n_group", 12}}), {"\"n_group\"", "12"}},
      {"groups with too few experts",
       With(Glm4Moe(), {{"n_group", 6}, {"topk_group", 1}}),
       {"\"topk_group\"", "3 num_experts_per_tok"}},
      {"router of another kind",
       With(MiniMaxM2(), {{"scoring_func", "softmax"}}),
       {"\"scoring_func\"", "softmax"}},
      {"linear attention", With(MiniMaxM2(), {{"attn_type_list", {1, 0, 1}}}), {"\"attn_type_list\""}},
      {"an odd number of rotated dimensions",
       With(MiniMaxM2(), {{"rotary_dim", 7}}),
       {"\"partial_rotary_factor\"", "7"}},
      {"partly rotated",
       With(Llama(), {{"partial_rotary_factor", 0.5}}),
       {"\"partial_rotary_factor\"", "0.5"}},
      {"partly rotated, inside",
       Rope({{"partial_rotary_factor", 0.5}}),
       {"\"rope_scaling.partial_rotary_factor\""}},
      {"linear without factor", Rope({{"rope_type", "linear"}}), {"\"rope_scaling.factor\"", "missing"}},
      {"factor below one",
       Rope({{"rope_type", "linear"}, {"factor", 0.5}}),
       {"\"rope_scaling.factor\"", "0.5"}},
      {"key of another rope",
       Rope({{"rope_type", "linear"}, {"factor", 2.0}, {"beta_fast", 32}}),
       {"rope_scaling.beta_fast"}},
      {"factor in default rope", Rope({{"rope_type", "default"}, {"factor", 2.0}}), {"rope_scaling.factor"}},
      {"llama3 without low",
       Rope(Without(llama3, "low_freq_factor")),
       {"\"rope_scaling.low_freq_factor\"", "missing"}},
      {"llama3 backwards",
       Rope(With(llama3, {{"high_freq_factor", 1.0}})),
       {"\"rope_scaling.high_freq_factor\""}},
      {"yarn backwards",
       Rope(With(yarn, {{"beta_fast", 1}, {"beta_slow", 2}})),
       {"\"rope_scaling.beta_fast\""}},
      {"yarn beyond all positions",
       Rope(With(yarn, {{"factor", 1e6}, {"original_max_position_embeddings", 1e6}})),
       {"\"rope_scaling.factor\""}},
      {"yarn truncate as text", Rope(With(yarn, {{"truncate", "no"}})), {"\"rope_scaling.truncate\"", "no"}},
      {"multimodal sections",
       Rope({{"rope_type", "default"}, {"mrope_section", {1, 2}}}),
       {"rope_scaling.mrope_section"}},
  };
}

TEST(ModelConfigTest, RefusesWhatIsNotImplementedByName) {
  for (const BadConfig& bad : BadConfigs()) {
    SCOPED_TRACE(bad.what);
    const auto parsed = ModelConfig::Parse(bad.config.dump(), kPath);
    ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << parsed.status();
    const std::string message(parsed.status().message());
    EXPECT_THAT(message, HasSubstr(kPath));
    for (const std::string& named : bad.named) EXPECT_THAT(message, HasSubstr(named));
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

TEST(ModelConfigTest, RefusesBrokenJson) {
  const struct {
    std::string text;
    std::string named;
  } kCases[] = {
      {"", "no valid JSON"},
      {"{\"hidden_size\": 64,}", "no valid JSON at byte"},
      {"[]", "object"},
      {"{\"hidden_size\": NaN}", "no valid JSON"},
      {R"({"hidden_size": 64, "hidden_size": 32})", "\"hidden_size\" appears twice"},
      {std::string(1000, '['), "deeper"},
  };
  for (const auto& [text, named] : kCases) {
    SCOPED_TRACE(text.substr(0, 40));
    const auto parsed = ModelConfig::Parse(text, kPath);
    ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parsed.status().message()), testing::AllOf(HasSubstr(kPath), HasSubstr(named)));
  }
}

}  // namespace
}  // namespace meshfill
