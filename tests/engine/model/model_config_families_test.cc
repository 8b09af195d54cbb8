// What the config.json of each family says: experts, gpt-oss, Phi-3, Gemma 3; and published models' sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "engine/model/layer_shape.h"
#include "tests/engine/model/config_json.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::ElementsAre;

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

  const auto glm_groups = [](const json& changes) { return ParseGood(With(Glm4Moe(), changes)).router; };
  EXPECT_EQ(glm_groups({{"n_group", 4}, {"topk_group", 1}}).used_groups, 1);  // just the experts of a token
  EXPECT_EQ(glm_groups({{"n_routed_experts", 1}, {"num_experts_per_tok", 1}}).groups, 1);
  EXPECT_EQ(glm_groups(json::object()).scale, 1);
  EXPECT_TRUE(glm_groups(json::object()).normalised);
  EXPECT_EQ(ParseGood(With(Glm4Moe(), {{"num_mtp_layers", 2}})).unused_layers, 2);
  EXPECT_EQ(ParseGood(With(Glm4Moe(), {{"use_qk_norm", true}})).qk_norm, QkNorm::kHead);
  EXPECT_THAT(ExpertLayers(ParseGood(With(Glm4Moe(), {{"first_k_dense_replace", 9}}))),
              ElementsAre(false, false, false));

  const ModelConfig minimax = ParseGood(MiniMaxM2());
  EXPECT_EQ(minimax.shape.experts, (ExpertsShape{.count = 5, .used = 3, .width = 96}));
  EXPECT_THAT(ExpertLayers(minimax), ElementsAre(true, true, true));
  EXPECT_EQ(minimax.qk_norm, QkNorm::kHeads);
  EXPECT_EQ(minimax.shape.rope_dim, 8);
  EXPECT_EQ(ParseGood(Without(MiniMaxM2(), "rotary_dim")).shape.rope_dim, 0);  // all of a head

  const json mixtral = With(Base("mixtral", "MixtralForCausalLM"),
                            {{"num_local_experts", 5}, {"num_experts_per_tok", 3}, {"sliding_window", 9}});
  EXPECT_EQ(ParseGood(mixtral).router, (RouterRule{.experts = 5, .used = 3, .normalised = true}));
  EXPECT_THAT(WindowsOf(ParseGood(mixtral)), ElementsAre(9, 9, 9));
  EXPECT_THAT(WindowsOf(ParseGood(Without(mixtral, "sliding_window"))), ElementsAre(0, 0, 0));
}

// What the published config says beside is what the family is.
TEST(ModelConfigTest, ReadsMiniMaxM2AsItIsPublished) {
  const json quantisation = {{"activation_scheme", "dynamic"},
                             {"fmt", "float8_e4m3fn"},
                             {"quant_method", "fp8"},
                             {"weight_block_size", {128, 128}},
                             {"modules_to_not_convert", {"gate", "e_score_correction_bias", "lm_head"}}};
  const ModelConfig config = ParseGood(With(MiniMaxM2(), {{"attn_type_list", {1, 1, 1}},
                                                          {"quantization_config", quantisation},
                                                          {"auto_map", {{"AutoConfig", "x"}}},
                                                          {"layernorm_full_attention_beta", 1.0},
                                                          {"layernorm_linear_attention_beta", 1.0},
                                                          {"layernorm_mlp_beta", 1.0},
                                                          {"mlp_intermediate_size", 8192},
                                                          {"mtp_transformer_layers", 1},
                                                          {"num_mtp_modules", 3},
                                                          {"qk_norm_type", "per_layer"},
                                                          {"scoring_func", "sigmoid"},
                                                          {"shared_intermediate_size", 0},
                                                          {"shared_moe_mode", "sigmoid"},
                                                          {"use_mtp", true},
                                                          {"use_qk_norm", true},
                                                          {"use_routing_bias", true}}));
  EXPECT_EQ(config.router,
            (RouterRule{.score = RouterScore::kSigmoid, .experts = 5, .used = 3, .normalised = true}));
  EXPECT_TRUE(config.router_correction);
  EXPECT_EQ(config.unused_layers, 3);
  EXPECT_EQ(ParseGood(MiniMaxM2()).unused_layers, 0);
  EXPECT_EQ(config.shape.fp8, (Fp8Blocks{.rows = 128, .columns = 128}));
  EXPECT_STREQ(config.fp8.scales, "weight_scale_inv");
}

TEST(ModelConfigTest, ReadsQwen3MoeAsTransformers5WritesIt) {
  const json renamed = With(Without(Qwen3Moe(), "num_experts"), {{"num_local_experts", 6}});
  EXPECT_EQ(ParseGood(renamed).shape.experts.count, 6);
  EXPECT_EQ(ParseGood(renamed).router.experts, 6);
  EXPECT_EQ(ParseGood(With(Qwen3Moe(), {{"num_local_experts", 5}})).shape.experts.count, 5);
}

TEST(ModelConfigTest, ReadsQwen3CoderAsItIsPublished) {
  const ModelConfig config = ParseGood(
      With(Qwen3Moe(), {{"qkv_bias", false}, {"shared_expert_intermediate_size", 0}, {"use_qk_norm", true}}));
  EXPECT_EQ(config.qk_norm, QkNorm::kHead);
  EXPECT_FALSE(config.qkv_bias || config.o_bias);
  EXPECT_EQ(config.shape.experts.shared_width, 0);
}

// Those of transformers' configuration classes, where config.json says nothing but what it must.
TEST(ModelConfigTest, FamiliesHaveTheirDefaultSizes) {
  const json rope = {{"rope_scaling", {{"rope_type", "default"}}}};
  const struct {
    const char* model_type;
    json needed;
    int64_t hidden, intermediate;
    int layers, q_heads, kv_heads, head_dim;
    int64_t vocab, context_tokens;
    float norm_eps;
    double theta;
  } families[] = {
      {"llama", {}, 4096, 11008, 32, 32, 32, 128, 32000, 2048, 1e-6f, 1e4},
      {"mistral", {}, 4096, 14336, 32, 32, 8, 128, 32000, 131072, 1e-6f, 1e4},
      {"qwen2", {}, 4096, 22016, 32, 32, 32, 128, 151936, 32768, 1e-6f, 1e4},
      {"qwen3", {}, 4096, 22016, 32, 32, 32, 128, 151936, 32768, 1e-6f, 1e4},
      {"qwen3_moe", {}, 2048, 6144, 24, 32, 4, 64, 151936, 32768, 1e-6f, 1e4},
      {"mixtral", {}, 4096, 14336, 32, 32, 8, 128, 32000, 131072, 1e-5f, 1e6},
      {"glm4_moe", {{"head_dim", 128}}, 4096, 10944, 46, 96, 8, 128, 151552, 131072, 1e-5f, 1e4},
      {"minimax_m2", {}, 3072, 1536, 62, 48, 8, 128, 200064, 196608, 1e-6f, 5e6},
      {"phi3", {}, 3072, 8192, 32, 32, 32, 96, 32064, 4096, 1e-5f, 1e4},
      {"gemma3_text", {}, 2304, 9216, 26, 8, 4, 256, 262208, 131072, 1e-6f, 1e6},
      {"gpt_oss", rope, 2880, 2880, 36, 64, 8, 64, 201088, 131072, 1e-5f, 15e4},
  };
  for (const auto& family : families) {
    SCOPED_TRACE(family.model_type);
    json stated = {{"model_type", family.model_type}};
    if (!family.needed.is_null()) stated.update(family.needed);
    const ModelConfig config = ParseGood(stated);
    const ModelShape& shape = config.shape;
    EXPECT_EQ(shape.hidden, family.hidden);
    EXPECT_EQ(shape.intermediate, family.intermediate);
    EXPECT_EQ(shape.layers, family.layers);
    EXPECT_EQ(shape.q_heads, family.q_heads);
    EXPECT_EQ(shape.kv_heads, family.kv_heads);
    EXPECT_EQ(shape.head_dim, family.head_dim);
    EXPECT_EQ(shape.vocab, family.vocab);
    EXPECT_EQ(shape.context_tokens, family.context_tokens);
    EXPECT_EQ(config.norm_eps, family.norm_eps);
    EXPECT_EQ(config.rope.theta, family.theta);
  }
}

// Those of transformers' configuration classes.
TEST(ModelConfigTest, ExpertsHaveTheirDefaults) {
  const auto of = [](const json& config) { return ParseGood(config).shape.experts; };
  const auto bare = [&](const char* model_type) {
    return of({{"model_type", model_type}, {"head_dim", 128}});
  };
  EXPECT_EQ(bare("qwen3_moe"), (ExpertsShape{.count = 128, .used = 8, .width = 768}));
  EXPECT_EQ(bare("glm4_moe"), (ExpertsShape{.count = 128, .used = 8, .width = 1408, .shared_width = 1408}));
  EXPECT_EQ(bare("mixtral"), (ExpertsShape{.count = 8, .used = 2, .width = 14336}));
  EXPECT_EQ(bare("minimax_m2"), (ExpertsShape{.count = 256, .used = 8, .width = 1536}));
  json gpt_oss = GptOss();
  for (const char* key : {"num_local_experts", "num_experts_per_tok", "experts_per_token"})
    gpt_oss.erase(key);
  EXPECT_EQ(of(gpt_oss), (ExpertsShape{.count = 128, .used = 4, .width = of(GptOss()).width}));
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

  json bare = GptOss();
  for (const char* key : {"attention_bias", "sliding_window", "swiglu_limit", "rope_theta"}) bare.erase(key);
  const ModelConfig by_default = ParseGood(bare);
  EXPECT_TRUE(by_default.qkv_bias && by_default.o_bias);
  EXPECT_EQ(by_default.swiglu_clamp.limit, 7);
  EXPECT_THAT(WindowsOf(by_default), ElementsAre(128, 0, 128));
  EXPECT_EQ(by_default.rope.theta, 150000);
  json new_spelling = GptOss();
  new_spelling["rope_parameters"] = std::exchange(new_spelling["rope_scaling"], nullptr);
  EXPECT_EQ(ParseGood(new_spelling).rope.scaling, RopeScaling::kYarn);

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
  for (const char* key : {"dtype", "torch_dtype"}) {  // a dtype that is stated counts
    const json stated =
        With(Without(GptOss(), "torch_dtype"), {{"quantization_config", quantisation}, {key, "float32"}});
    EXPECT_EQ(ParseGood(stated).shape.dtype, DType::kF32) << key;
  }
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
  const json as_published = {
      {"attention_bias", false}, {"lm_head_bias", false}, {"full_attn_mod", 1}, {"interpolate_factor", 1}};
  EXPECT_TRUE(ParseGood(With(Phi3(), as_published)).fused_projections);
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
  EXPECT_THAT(WindowsOf(ParseGood(With(Gemma3(), {{"num_hidden_layers", 7}, {"sliding_window", 5}}))),
              ElementsAre(5, 5, 5, 5, 5, 0, 5));
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

}  // namespace
}  // namespace meshfill
