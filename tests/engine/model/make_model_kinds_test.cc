// Models of every kind that a server loads: made, loaded by its own reader, and prefilled.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "engine/model/model_tensors.h"
#include "engine/prefill_engine.h"
#include "tests/engine/model/config_json.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr int64_t kShardBytes = int64_t{1} << 30;

// A prompt on two ranks has finite logits, and not all alike.
void ExpectPrefills(const std::string& folder) {
  const auto engine =
      LoadEmbeddedEngine({.model_path = folder, .ranks = 2, .peak_flops = 1e12, .speed = PoolSpeed()});
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<uint32_t> prompt(70);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i * i % 50);
  const auto result = RunPrefill(**engine, {prompt, {}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(std::all_of(result->logits.begin(), result->logits.end(),
                          [](float logit) { return std::isfinite(logit); }));
  const auto [least, most] = std::minmax_element(result->logits.begin(), result->logits.end());
  EXPECT_LT(*least, *most);
}

struct Made {
  HfFolder folder;
  ModelConfig config;  // as the server's reader has it, with what the tensors say
};

Made Inspect(const std::string& folder) {
  const auto tensors = ModelTensors::Find(folder);
  EXPECT_TRUE(tensors.ok()) << tensors.status();
  ExpectPrefills(folder);
  return {HfFolder::Read(folder), tensors.ok() ? (*tensors)->config() : ModelConfig()};
}

Made Make(const MakeModelOptions& options) {
  const TempFolder folder;
  const absl::Status made = MakeModel(options, folder.path());
  EXPECT_TRUE(made.ok()) << made;
  return Inspect(folder.path());
}

Made MakeOf(const json& config) {
  const TempFolder folder;
  folder.Write("config.json", config.dump());
  const absl::Status made = MakeModelOf(folder / "config.json", 1, kShardBytes, folder / "model");
  EXPECT_TRUE(made.ok()) << made;
  EXPECT_EQ(json::parse(ReadWholeFile(folder / "model/config.json")), config);
  return Inspect(folder / "model");
}

MakeModelOptions Small(ModelFamily family) {
  MakeModelOptions options;
  options.family = family;
  options.layers = 3;
  options.hidden = 64;
  options.intermediate = 96;
  options.head_dim = 16;
  options.vocab = 50;
  options.context_tokens = 4096;
  return options;
}

double Deviation(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) squares += double{value} * value;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

bool Has(const HfFolder& folder, const std::string& name) { return folder.tensors.contains(name); }

TEST(MakeModelKindsTest, Fp8HasAScaleForEachRowOrMatrix) {
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kQwen3Moe, ModelFamily::kPhi3,
                                   ModelFamily::kGlm4Moe, ModelFamily::kGptOss}) {
    for (const Fp8Scales shared : {Fp8Scales::kChannel, Fp8Scales::kTensor}) {
      const bool channel = shared == Fp8Scales::kChannel;
      SCOPED_TRACE(testing::Message() << static_cast<int>(family) << (channel ? ", channel" : ", tensor"));
      MakeModelOptions options = Small(family);
      options.dtype = DType::kF8E4M3;
      options.fp8_scales = shared;
      const Made made = Make(options);
      const json& quantization = made.folder.config.at("quantization_config");
      EXPECT_EQ(quantization.at("quant_method"), "compressed-tensors");
      EXPECT_EQ(quantization.at("config_groups").at("group_0").at("weights").at("strategy"),
                channel ? "channel" : "tensor");
      EXPECT_EQ(made.config.shape.fp8,
                (Fp8Blocks{.rows = channel ? 1 : Fp8Blocks::kAll, .columns = Fp8Blocks::kAll}));
      int matrices = 0;
      for (const auto& [name, tensor] : made.folder.tensors) {
        if (tensor.type != ElementType::kF8E4M3) continue;
        SCOPED_TRACE(name);
        ++matrices;
        ASSERT_TRUE(Has(made.folder, name + "_scale"));
        const HfTensor& scales = made.folder.tensors.at(name + "_scale");
        EXPECT_EQ(scales.type, ElementType::kBf16);  // as llm-compressor writes them
        EXPECT_EQ(scales.shape,
                  channel ? (std::vector<int64_t>{tensor.shape[0], 1}) : (std::vector<int64_t>{1}));
        const double in_features = static_cast<double>(tensor.shape[1]);
        EXPECT_NEAR(Deviation(tensor.Floats()) * Deviation(scales.Floats()) * std::sqrt(in_features), 1,
                    channel ? 0.15 : 0.4);  // one scale alone deviates more
      }
      EXPECT_GE(matrices, 3 * 2);
      EXPECT_EQ(made.folder.tensors.at("lm_head.weight").type, ElementType::kBf16);
      EXPECT_EQ(made.folder.tensors.at("model.norm.weight").type, ElementType::kBf16);
    }
  }
}

TEST(MakeModelKindsTest, FirstLayersMayBeDense) {
  for (const ModelFamily family : {ModelFamily::kQwen3Moe, ModelFamily::kGlm4Moe}) {
    const int usual = family == ModelFamily::kGlm4Moe ? 1 : 0;
    for (const std::optional<int> dense : {std::optional<int>(), std::optional(0), {1}, {2}, {3}}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(family) << ", dense " << dense.value_or(-1));
      MakeModelOptions options = Small(family);
      options.dense_layers = dense;
      const Made made = Make(options);
      ASSERT_EQ(made.config.layers.size(), 3u);
      for (int layer = 0; layer < 3; ++layer) {
        const bool is_dense = layer < dense.value_or(usual);
        EXPECT_EQ(made.config.layers[layer].mlp, is_dense ? MlpKind::kDense : MlpKind::kExperts) << layer;
        const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp.";
        EXPECT_EQ(Has(made.folder, mlp + "gate_proj.weight"), is_dense) << layer;
        EXPECT_EQ(Has(made.folder, mlp + "experts.7.gate_proj.weight"), !is_dense) << layer;
      }
    }
  }
}

// The reader skips them: all else is as without them.
TEST(MakeModelKindsTest, LayersBehindTheLastPredictFurtherTokens) {
  for (const ModelFamily family : {ModelFamily::kGlm4Moe, ModelFamily::kMiniMaxM2}) {
    for (const DType dtype : {DType::kBf16, DType::kF8E4M3}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(family) << ", " << DTypeName(dtype));
      MakeModelOptions options = Small(family);
      options.dtype = dtype;
      const Made without = Make(options);
      options.next_layers = 2;
      const Made made = Make(options);
      EXPECT_EQ(made.config.unused_layers, 2);
      EXPECT_EQ(made.config.shape, without.config.shape);
      for (const auto& [name, tensor] : without.folder.tensors) {
        EXPECT_EQ(tensor.bytes, made.folder.tensors.at(name).bytes) << name;
      }
      int last = 0, further = 0;
      for (const auto& [name, tensor] : made.folder.tensors) {
        last += name.starts_with("model.layers.2.") ? 1 : 0;
        further += name.starts_with("model.layers.3.") || name.starts_with("model.layers.4.") ? 1 : 0;
      }
      EXPECT_EQ(further, 2 * (last + 4));  // and enorm, hnorm, eh_proj, shared_head.norm
      EXPECT_EQ(made.folder.tensors.at("model.layers.4.eh_proj.weight").shape,
                (std::vector<int64_t>{64, 128}));
      EXPECT_TRUE(Has(made.folder, "model.layers.3.shared_head.norm.weight"));
      EXPECT_EQ(made.folder.tensors.at("model.layers.3.self_attn.q_proj.weight").type,
                made.folder.tensors.at("model.layers.2.self_attn.q_proj.weight").type);
    }
  }
}

TEST(MakeModelKindsTest, AConfigOfAnyFamilyIsAModel) {
  const json llama_biases = With(Llama(), {{"attention_bias", true}, {"mlp_bias", true}});
  const json qwen_windows =
      With(Qwen3(), {{"use_sliding_window", true}, {"sliding_window", 16}, {"max_window_layers", 1}});
  const json of_steps = With(Qwen3Moe(), {{"decoder_sparse_step", 2}, {"mlp_only_layers", json::array()}});
  const json groups = With(Glm4Moe(), {{"n_group", 4},
                                       {"topk_group", 2},
                                       {"attention_bias", true},
                                       {"first_k_dense_replace", 2},
                                       {"n_shared_experts", 2},
                                       {"num_nextn_predict_layers", 1}});
  const json f32 = With(Mistral(), {{"torch_dtype", "float32"}, {"sliding_window", 9}});
  const json f16 = With(Qwen2(), {{"torch_dtype", "float16"}});
  const json stretched =
      With(Phi3(), {{"rope_scaling", LongRope()}, {"original_max_position_embeddings", 32}});
  const json four_bits = With(GptOss(), {{"quantization_config", {{"quant_method", "mxfp4"}}}});
  for (const json& config : {llama_biases, qwen_windows, of_steps, groups, f32, f16, four_bits, MiniMaxM2(),
                             stretched, Gemma3(), GptOss()}) {
    SCOPED_TRACE(config.dump());
    MakeOf(config);
  }
  EXPECT_EQ(MakeOf(f32).folder.tensors.at("lm_head.weight").type, ElementType::kF32);
  EXPECT_EQ(MakeOf(f16).folder.tensors.at("lm_head.weight").type, ElementType::kF16);
  const Made made = MakeOf(of_steps);
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(made.config.layers[layer].mlp, layer == 1 ? MlpKind::kExperts : MlpKind::kDense) << layer;
  }
}

// What a config leaves out of FP8 is in bf16: matrices go by products, so all of q, k and v where k is left
// out.
TEST(MakeModelKindsTest, AConfigSaysWhatIsInFp8) {
  const Made channels =
      MakeOf(Compressed({{"ignore", {"lm_head", "re:.*layers.1.self_attn.k_proj"}}}, json::object()));
  const auto type = [](const Made& made, const std::string& name) {
    return made.folder.tensors.at("model.layers." + name + ".weight").type;
  };
  EXPECT_EQ(type(channels, "0.self_attn.k_proj"), ElementType::kF8E4M3);
  for (const std::string name : {"q_proj", "k_proj", "v_proj"}) {
    EXPECT_EQ(type(channels, "1.self_attn." + name), ElementType::kBf16) << name;
    EXPECT_FALSE(Has(channels.folder, "model.layers.1.self_attn." + name + ".weight_scale")) << name;
  }
  EXPECT_EQ(type(channels, "1.self_attn.o_proj"), ElementType::kF8E4M3);

  const Made blocks = MakeOf(Fp8({{"weight_block_size", {5, 7}}}));
  EXPECT_EQ(type(blocks, "0.mlp.up_proj"), ElementType::kF8E4M3);
  const HfTensor& scales = blocks.folder.tensors.at("model.layers.0.mlp.up_proj.weight_scale_inv");
  EXPECT_EQ(scales.type, ElementType::kF32);
  EXPECT_EQ(scales.shape, (std::vector<int64_t>{20, 10}));  // of 96 · 64

  const Made blocks_of_structure =
      MakeOf(Compressed(json::object(), {{"strategy", "block"}, {"block_structure", {32, 64}}}));
  EXPECT_EQ(blocks_of_structure.folder.tensors.at("model.layers.0.mlp.up_proj.weight_scale").shape,
            (std::vector<int64_t>{3, 1}));
}

// The names are those of the model that reads images.
TEST(MakeModelKindsTest, AConfigMayHaveTheLanguageModelInside) {
  for (const bool tied : {false, true}) {
    const Made made = MakeOf(Gemma3WithImages({{"hidden_size", 64},
                                               {"intermediate_size", 96},
                                               {"num_hidden_layers", 7},
                                               {"num_attention_heads", 4},
                                               {"num_key_value_heads", 2},
                                               {"head_dim", 16},
                                               {"vocab_size", 50},
                                               {"tie_word_embeddings", tied}}));
    EXPECT_TRUE(made.config.inside_another);
    EXPECT_TRUE(Has(made.folder, "language_model.model.layers.6.mlp.up_proj.weight"));
    EXPECT_EQ(Has(made.folder, "language_model.lm_head.weight"), !tied);
    EXPECT_FALSE(Has(made.folder, "model.norm.weight"));
  }
}

TEST(MakeModelKindsTest, RefusesAConfigByItsKey) {
  const TempFolder folder;
  folder.Write("config.json", With(Llama(), {{"sliding_window", 8}}).dump());
  const std::string model = folder / "model";
  const absl::Status unknown = MakeModelOf(folder / "config.json", 1, kShardBytes, model);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument) << unknown;
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("sliding_window"));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr(folder / "config.json"));
  folder.Write("config.json", Llama().dump());
  EXPECT_THAT(std::string(MakeModelOf(folder / "config.json", 1, 0, model).message()),
              HasSubstr("shard_bytes"));
  EXPECT_FALSE(MakeModelOf(folder / "none.json", 1, kShardBytes, model).ok());
  EXPECT_FALSE(std::filesystem::exists(model));
}

}  // namespace
}  // namespace meshfill
