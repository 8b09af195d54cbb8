// What a config.json says of the shape: its keys, their defaults, sliding windows, and FP8's scales.
#include "engine/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "engine/model/layer_shape.h"
#include "tests/engine/model/config_json.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::ElementsAre;

LayerParts Parts(std::initializer_list<LayerPart> parts) {
  LayerParts set;
  for (const LayerPart part : parts) set.Add(part);
  return set;
}
LayerParts WideParts(const ModelConfig& config, size_t layer) {
  return layer < config.layers.size() ? config.layers[layer].wide : LayerParts();
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

TEST(ModelConfigTest, TrainingGenerationAndBookkeepingChangeNothing) {
  constexpr absl::string_view kKeys =
      "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path "
      "assistant_confidence_threshold assistant_lookbehind attention_dropout attn_implementation "
      "bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward "
      "decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
      "encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
      "finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder "
      "label2id length_penalty max_length max_sequence_length min_length model_max_length name_or_path "
      "no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams "
      "num_labels num_return_sequences output_attentions output_hidden_states output_router_logits "
      "output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict "
      "return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens "
      "target_lookbehind task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p "
      "torchscript transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 "
      "use_cache";
  for (const absl::string_view key : absl::StrSplit(kKeys, ' ')) {
    SCOPED_TRACE(key);
    EXPECT_EQ(ParseGood(With(Llama(), {{std::string(key), 7}})).shape.layers, 3);
  }
}

TEST(ModelConfigTest, WhatAFamilyFixesMayBeStated) {
  const ModelConfig config =
      ParseGood(With(Llama(), {{"partial_rotary_factor", 1.0}, {"pretraining_tp", 1}}));
  EXPECT_EQ(config.shape.rope_dim, 0);  // all of a head
  const json all = {{"mlp_bias", false},
                    {"hidden_act", "silu"},
                    {"is_encoder_decoder", false},
                    {"add_cross_attention", false},
                    {"tie_encoder_decoder", false},
                    {"pruned_heads", json::object()},
                    {"use_mrope", false}};
  EXPECT_EQ(ParseGood(With(Llama(), all)).shape.layers, 3);
  EXPECT_EQ(ParseGood(Rope({{"rope_type", "default"}, {"partial_rotary_factor", 1}})).shape.rope_dim, 0);
}

TEST(ModelConfigTest, SlidingWindows) {
  EXPECT_THAT(WindowsOf(ParseGood(With(Mistral(), {{"sliding_window", 7}}))), ElementsAre(7, 7, 7));
  const std::vector<std::string> sliding(3, "sliding_attention"), full(3, "full_attention");  // as it is
  EXPECT_THAT(WindowsOf(ParseGood(With(Mistral(), {{"layer_types", sliding}}))),
              ElementsAre(4096, 4096, 4096));
  EXPECT_THAT(WindowsOf(ParseGood(With(Llama(), {{"layer_types", full}}))), ElementsAre(0, 0, 0));
  const json window = {{"sliding_window", 7}, {"max_window_layers", 1}};
  EXPECT_THAT(WindowsOf(ParseGood(With(Qwen2(), window))), ElementsAre(0, 0, 0));
  const ModelConfig qwen2 = ParseGood(With(With(Qwen2(), window), {{"use_sliding_window", true}}));
  EXPECT_THAT(WindowsOf(qwen2), ElementsAre(0, 7, 7));
  EXPECT_THAT(qwen2.shape.kinds, ElementsAre(LayerKind{{}, 1}, LayerKind{{.window = 7}, 2}));
  const json types = {"sliding_attention", "full_attention", "sliding_attention"};
  const ModelConfig qwen3 =
      ParseGood(With(With(Qwen3(), window), {{"use_sliding_window", true}, {"layer_types", types}}));
  EXPECT_THAT(WindowsOf(qwen3), ElementsAre(7, 0, 7));
  const json defaults = {{"use_sliding_window", true}, {"num_hidden_layers", 29}};  // from layer 28 on, 4096
  EXPECT_THAT(ParseGood(With(Qwen3(), defaults)).shape.kinds,
              ElementsAre(LayerKind{{}, 28}, LayerKind{{.window = 4096}, 1}));
}

// The largest sizes that a config may have.
TEST(ModelConfigTest, SizesHaveTheirBounds) {
  const struct {
    const char* key;
    json config;
    int64_t most;
  } kCases[] = {
      {"num_hidden_layers", Llama(), 1024},
      {"hidden_size", With(Llama(), {{"head_dim", 16}}), int64_t{1} << 20},
      {"intermediate_size", Llama(), int64_t{1} << 22},
      {"vocab_size", Llama(), int64_t{1} << 24},
      {"max_position_embeddings", Llama(), (int64_t{1} << 31) - 1},
      {"num_attention_heads", With(Llama(), {{"head_dim", 16}}), 4096},
      {"num_key_value_heads", With(Llama(), {{"num_attention_heads", 4096}, {"head_dim", 16}}), 4096},
      {"head_dim", Llama(), 256},
      {"sliding_window", Mistral(), (int64_t{1} << 31) - 1},
      {"num_experts", Qwen3Moe(), 4096},
      {"num_experts_per_tok", With(Qwen3Moe(), {{"num_experts", 300}}), 256},
      {"moe_intermediate_size", Qwen3Moe(), int64_t{1} << 20},
      {"n_shared_experts", Glm4Moe(), 1024},
      {"num_nextn_predict_layers", Glm4Moe(), 64},
      {"num_mtp_layers", Glm4Moe(), 64},
  };
  for (const auto& [key, config, most] : kCases) {
    SCOPED_TRACE(key);
    EXPECT_TRUE(ModelConfig::Parse(With(config, {{key, most}}).dump(), kPath).ok());
    const absl::Status above = ModelConfig::Parse(With(config, {{key, most + 1}}).dump(), kPath).status();
    EXPECT_TRUE(absl::IsInvalidArgument(above)) << above;
    EXPECT_NE(above.message().find(key), std::string::npos) << above;
  }
}

// Each size is within its bound. Together they would overflow what plans and budgets are counted in.
TEST(ModelConfigTest, SizesAreBoundedTogether) {
  constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;
  const json wide = {{"num_hidden_layers", 1024}, {"hidden_size", 1 << 20}, {"head_dim", 16}};
  const struct {
    const char* what;
    json config;
    std::vector<std::string> named;
  } kCases[] = {
      {"experts of all layers",
       With(With(Qwen3Moe(), wide), {{"num_experts", 4096}, {"moe_intermediate_size", 1 << 20}}),
       {"num_hidden_layers 1024", "hidden_size 1048576", "4096 experts of width 1048576", "the weights"}},
      {"dense layers",
       With(With(Llama(), wide), {{"intermediate_size", 1 << 17}}),
       {"num_hidden_layers 1024", "intermediate_size 131072", "the weights"}},
      {"K and V",
       With(Llama(), {{"num_hidden_layers", 1024},
                      {"num_attention_heads", 4096},
                      {"num_key_value_heads", 4096},
                      {"head_dim", 256},
                      {"max_position_embeddings", kMostTokens}}),
       {"max_position_embeddings 2147483647", "num_key_value_heads 4096", "K and V"}},
      {"rows of experts",
       With(Qwen3Moe(), {{"num_experts", 256},
                         {"num_experts_per_tok", 256},
                         {"moe_intermediate_size", 1 << 20},
                         {"max_position_embeddings", kMostTokens}}),
       {"max_position_embeddings 2147483647", "256 used experts of width 1048576", "a layer"}},
  };
  for (const auto& [what, config, named] : kCases) {
    SCOPED_TRACE(what);
    const absl::Status status = ModelConfig::Parse(config.dump(), kPath).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    for (const std::string& name : named) EXPECT_NE(status.message().find(name), std::string::npos) << status;
  }
  const ModelShape most = ParseGood(With(With(Llama(), wide), {{"intermediate_size", 1 << 16}})).shape;
  EXPECT_GT(LayersMatrixElements(most), int64_t{1} << 47);
}

TEST(ModelConfigTest, DTypeInOldAndNewSpelling) {
  EXPECT_EQ(ParseGood(With(Llama(), {{"torch_dtype", "float16"}})).shape.dtype, DType::kF16);
  EXPECT_EQ(ParseGood(With(Llama(), {{"dtype", "float32"}})).shape.dtype, DType::kF32);
  EXPECT_EQ(ParseGood(With(Llama(), {{"dtype", nullptr}})).shape.dtype, DType::kBf16);
  EXPECT_EQ(ParseGood(Without(Llama(), "torch_dtype")).shape.dtype, DType::kF32);
}

TEST(ModelConfigTest, QuantizedModelsAreBf16WhereNothingSaysAnother) {
  for (const json& config : {Fp8(json::object()), Compressed(json::object(), json::object())}) {
    EXPECT_EQ(ParseGood(Without(config, "torch_dtype")).shape.dtype, DType::kBf16);
    EXPECT_EQ(ParseGood(With(config, {{"torch_dtype", "float32"}})).shape.dtype, DType::kF32);
  }
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

  // As other writers have it, and nothing that is measured ahead.
  for (const json& same :
       {json{{"format", "naive-quantized"}}, json{{"sparsity_config", {{"format", "dense"}}}},
        json{{"transform_config", json::object()}}}) {
    EXPECT_EQ(ParseGood(Compressed(same, json::object())).fp8.blocks, channels.fp8.blocks) << same;
  }

  // As other writers have it, and what transformers 5 adds.
  const json same = {
      {"dequantize", false}, {"scale_fmt", "float"}, {"ignored_layers", {"model.layers.1.self_attn.o_proj"}}};
  EXPECT_EQ(ParseGood(Fp8(same)).fp8.blocks, blocks.fp8.blocks);
  EXPECT_EQ(WideParts(ParseGood(Fp8(same)), 1), Parts({LayerPart::kO}));

  // gpt-oss's experts are one tensor, which is never in FP8.
  const json quantisation = Fp8(json::object()).at("quantization_config");
  const ModelConfig stacked = ParseGood(With(GptOss(), {{"quantization_config", quantisation}}));
  EXPECT_EQ(stacked.shape.fp8, blocks.fp8.blocks);
  EXPECT_EQ(WideParts(stacked, 2), Parts({LayerPart::kExpertGateUp, LayerPart::kExpertDown}));
}

// What a config leaves out of FP8 is wide in a plan, product by product.
TEST(ModelConfigTest, CountsAsWideWhatIsLeftOutOfFp8) {
  const LayerParts none, attention = Parts({LayerPart::kQkv, LayerPart::kO}),
                         mlp = Parts({LayerPart::kGateUp, LayerPart::kDown});
  const struct {
    const char* entry;
    LayerParts first, last;  // of the first layer, and the last
  } kCases[] = {
      {"model.layers.0.self_attn.q_proj", Parts({LayerPart::kQkv}), none},
      {"model.layers.0.mlp", mlp, none},
      {"model.layers.2.self_attn", none, attention},
      {"language_model.model.layers.2.self_attn", none, attention},
      {"model.language_model.layers.2.self_attn", none, attention},
      {"o_proj", Parts({LayerPart::kO}), Parts({LayerPart::kO})},
      {"re:.*self_attn.*", attention, attention},
      {R"(re:model\.layers\.[12]\.mlp\.down_proj)", none, Parts({LayerPart::kDown})},
      {R"(re:.*down_proj$)", Parts({LayerPart::kDown}), Parts({LayerPart::kDown})},
      // What is none of the model's layers, or none of their matrices in FP8.
      {"lm_head", none, none},
      {"re:.*lm_head", none, none},
      {"model.layers.0.mlp.gate", none, none},
      {"model.layers.3.eh_proj", none, none},
      {"model.layers.3.self_attn.q_proj", none, none},
      {"model.layers.13.mlp", none, none},
      {"vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", none, none},
      {"re:vision_tower.*", none, none},
      {"re:layers.*", none, none},  // patterns match from where the name begins
      {"proj", none, none},
  };
  for (const auto& [entry, first, last] : kCases) {
    SCOPED_TRACE(entry);
    for (const ModelConfig& config : {ParseGood(Fp8({{"modules_to_not_convert", {"lm_head", entry, "x"}}})),
                                      ParseGood(Compressed({{"ignore", {"x", entry}}}, json::object()))}) {
      EXPECT_EQ(config.shape.fp8, config.fp8.blocks);
      EXPECT_EQ(WideParts(config, 0), first);
      EXPECT_EQ(WideParts(config, 2), last);
      EXPECT_EQ(config.shape.kinds, LayerKindsOf(config.layers));
    }
  }
  // Nothing is left, and what cannot be read as a pattern.
  for (const json& entries : {json{"self_attn", "mlp"}, json{"re:(?!vision).*"}}) {
    const ModelConfig config = ParseGood(Fp8({{"modules_to_not_convert", entries}}));
    EXPECT_EQ(config.shape.fp8, Fp8Blocks()) << entries;
    EXPECT_EQ(config.shape.kinds, (std::vector{LayerKind{{}, 3}})) << entries;
  }
  // All experts, by the name of what is around them.
  const json experts = Fp8({{"modules_to_not_convert", {"model.layers.1.mlp.experts"}}});
  EXPECT_EQ(
      WideParts(ParseGood(With(Qwen3Moe(), {{"quantization_config", experts["quantization_config"]}})), 1),
      Parts({LayerPart::kExpertGateUp, LayerPart::kExpertDown}));
}

}  // namespace
}  // namespace meshfill
