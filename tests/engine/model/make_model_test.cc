#include "engine/model/make_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/model.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

MakeModelOptions Small() {
  MakeModelOptions options;
  options.hidden = 32;
  options.vocab = 50;
  return options;
}

HfFolder Make(const MakeModelOptions& options) {
  const TempFolder folder;
  const absl::Status made = MakeModel(options, folder.path());
  EXPECT_TRUE(made.ok()) << made;
  return HfFolder::Read(folder.path());
}

uint64_t Fnv1a(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : text) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
  return hash;
}

// Benchmarks and demos refer to models by their options, so the bytes may not depend on machine or build.
TEST(MakeModelTest, MakesTheSameBytesEverywhere) {
  const TempFolder folder;
  ASSERT_TRUE(MakeModel(Small(), folder / "a").ok());
  ASSERT_TRUE(MakeModel(Small(), folder / "b").ok());
  const std::string weights = ReadWholeFile(folder / "a/model.safetensors");
  EXPECT_EQ(weights, ReadWholeFile(folder / "b/model.safetensors"));
  EXPECT_EQ(ReadWholeFile(folder / "a/config.json"), ReadWholeFile(folder / "b/config.json"));
  EXPECT_EQ(Fnv1a(weights), 17554794127039248868u);
}

TEST(MakeModelTest, TheSeedChangesEveryTensor) {
  MakeModelOptions options = Small();
  const HfFolder one = Make(options);
  options.seed = 2;
  const HfFolder two = Make(options);
  for (const auto& [name, tensor] : one.tensors) EXPECT_NE(tensor.bytes, two.tensors.at(name).bytes) << name;
}

TEST(MakeModelTest, LoadsInEveryFamily) {
  for (const Family* described : Families()) {
    const ModelFamily family = described->family;
    SCOPED_TRACE(described->name);
    const TempFolder folder;
    MakeModelOptions options = Small();
    options.family = family;
    options.tied_embeddings = true;
    if (described->has_window) options.sliding_window = 77;
    if (described->long_rope) options.original_context_tokens = 100;
    if (described->has_experts) {
      options.experts = 5;
      options.experts_used = 3;
      options.expert_width = 128;
    }
    ASSERT_TRUE(MakeModel(options, folder.path()).ok());
    std::unique_ptr<Device> device;
    const auto model = Model::Load(folder.path(), std::nullopt, [&](const ModelShape& shape) {
      device = MakeReferenceDevice(shape.dtype);
      return device.get();
    });
    ASSERT_TRUE(model.ok()) << model.status();
    const ModelConfig& config = (*model)->config();
    EXPECT_EQ(config.family, family);
    EXPECT_EQ(config.shape.layers, 2);
    EXPECT_EQ(config.shape.hidden, 32);
    EXPECT_EQ(config.shape.intermediate, 128);  // 8/3 · 32, up to a multiple of 64
    EXPECT_EQ(config.shape.head_dim, 8);
    EXPECT_EQ(config.shape.vocab, 50);
    EXPECT_EQ(config.shape.context_tokens, options.context_tokens);
    EXPECT_EQ(config.shape.long_rope_after, options.original_context_tokens);
    EXPECT_EQ(config.layers[0].window, options.sliding_window);
    EXPECT_EQ(config.shape.experts.count, options.experts);
    EXPECT_EQ(config.shape.experts.used, options.experts_used);
    EXPECT_EQ(config.shape.experts.width, options.expert_width);
    EXPECT_EQ(config.shape.dtype, DType::kBf16);
    EXPECT_EQ(config.rope.theta, options.rope_theta);
    EXPECT_TRUE(config.tied_embeddings);
  }
}

TEST(MakeModelTest, ShardsHoldTheSameTensors) {
  MakeModelOptions options = Small();
  const HfFolder whole = Make(options);
  const TempFolder folder;
  options.shard_bytes = 10000;
  ASSERT_TRUE(MakeModel(options, folder.path()).ok());
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
  int shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path().extension() == ".safetensors") ++shards;
  }
  EXPECT_GT(shards, 2);
  const HfFolder sharded = HfFolder::Read(folder.path());
  ASSERT_EQ(sharded.tensors.size(), whole.tensors.size());
  for (const auto& [name, tensor] : whole.tensors) {
    EXPECT_EQ(tensor.bytes, sharded.tensors.at(name).bytes) << name;
  }
}

struct Moments {
  double mean = 0;
  double deviation = 0;
};

Moments MomentsOf(const std::vector<float>& values) {
  Moments moments;
  for (const float value : values) moments.mean += value / static_cast<double>(values.size());
  for (const float value : values) moments.deviation += (value - moments.mean) * (value - moments.mean);
  moments.deviation = std::sqrt(moments.deviation / static_cast<double>(values.size()));
  return moments;
}

TEST(MakeModelTest, WeightsKeepActivationsOfOrderOne) {
  MakeModelOptions options;
  options.dtype = DType::kF32;
  const HfFolder model = Make(options);
  const auto moments = [&](const std::string& name) { return MomentsOf(model.tensors.at(name).Floats()); };
  for (const std::string name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    EXPECT_NEAR(moments("model.layers.1.self_attn." + name + ".weight").mean, 0, 0.002) << name;
    EXPECT_NEAR(moments("model.layers.1.self_attn." + name + ".weight").deviation, 1 / 16.0, 0.001) << name;
  }
  EXPECT_NEAR(moments("model.embed_tokens.weight").deviation, 1, 0.02);
  EXPECT_NEAR(moments("lm_head.weight").deviation, 1 / 16.0, 0.001);
  EXPECT_NEAR(moments("model.norm.weight").mean, 1, 0.03);
  EXPECT_NEAR(moments("model.norm.weight").deviation, 0.1, 0.02);
}

// One stream of numbers, rounded to each dtype.
TEST(MakeModelTest, HalfWeightsAreTheF32OnesRounded) {
  MakeModelOptions options = Small();
  options.dtype = DType::kF32;
  const HfFolder exact = Make(options);
  options.dtype = DType::kBf16;
  const HfFolder bf16 = Make(options);
  options.dtype = DType::kF16;
  const HfFolder f16 = Make(options);
  for (const auto& [name, tensor] : exact.tensors) {
    const std::vector<float> floats = tensor.Floats();
    const std::vector<float> from_bf16 = bf16.tensors.at(name).Floats(),
                             from_f16 = f16.tensors.at(name).Floats();
    for (size_t i = 0; i < floats.size(); ++i) {
      ASSERT_EQ(from_bf16[i], BFloat16::FromFloat(floats[i]).ToFloat()) << name;
      int exponent = 0;
      std::frexp(floats[i], &exponent);
      const double unit = std::ldexp(1.0, std::max(exponent, -13) - 11);  // of the last place
      ASSERT_LE(std::abs(double{from_f16[i]} - floats[i]), unit / 2) << name << ": " << floats[i];
    }
  }
}

// Elements of the same deviation as other weights', and scales beside them.
TEST(MakeModelTest, MakesWeightsInFp8) {
  MakeModelOptions options;
  options.dtype = DType::kF8E4M3;
  options.hidden = 192;
  const HfFolder model = Make(options);
  EXPECT_EQ(model.config["torch_dtype"], "bfloat16");
  EXPECT_EQ(model.config["quantization_config"]["quant_method"], "fp8");
  EXPECT_EQ(model.tensors.at("model.embed_tokens.weight").type, ElementType::kBf16);
  EXPECT_EQ(model.tensors.at("lm_head.weight").type, ElementType::kBf16);
  const HfTensor& matrix = model.tensors.at("model.layers.1.mlp.gate_proj.weight");
  const HfTensor& scales = model.tensors.at("model.layers.1.mlp.gate_proj.weight_scale_inv");
  EXPECT_EQ(matrix.type, ElementType::kF8E4M3);
  EXPECT_EQ(scales.type, ElementType::kF32);
  EXPECT_EQ(matrix.shape, (std::vector<int64_t>{512, 192}));
  EXPECT_EQ(scales.shape, (std::vector<int64_t>{4, 2}));
  const Moments elements = MomentsOf(matrix.Floats()), factors = MomentsOf(scales.Floats());
  EXPECT_NEAR(elements.mean / elements.deviation, 0, 0.02);
  EXPECT_NEAR(elements.deviation * factors.mean * std::sqrt(192), 1, 0.15);
  EXPECT_GT(factors.deviation, 0);
}

TEST(MakeModelTest, MakesExpertsInMxfp4) {
  MakeModelOptions options = Small();
  options.family = ModelFamily::kGptOss;
  options.dtype = DType::kF4E2M1;
  options.hidden = 64;
  options.intermediate = 96;
  const HfFolder model = Make(options);
  EXPECT_EQ(model.config["quantization_config"]["quant_method"], "mxfp4");
  const HfTensor& blocks = model.tensors.at("model.layers.1.mlp.experts.down_proj_blocks");
  const HfTensor& scales = model.tensors.at("model.layers.1.mlp.experts.down_proj_scales");
  EXPECT_EQ(blocks.shape, (std::vector<int64_t>{8, 64, 3, 16}));
  EXPECT_EQ(scales.shape, (std::vector<int64_t>{8, 64, 3}));
  EXPECT_EQ(model.tensors.at("model.layers.1.self_attn.q_proj.weight").type, ElementType::kBf16);
  std::vector<float> values;
  for (size_t i = 0; i < blocks.bytes.size(); ++i) {
    const auto byte = static_cast<uint8_t>(blocks.bytes[i]);
    const float scale = E8M0ToFloat(static_cast<uint8_t>(scales.bytes[i / 16]));
    values.insert(values.end(),
                  {Fp4ToFloat(byte) * scale, Fp4ToFloat(static_cast<uint8_t>(byte >> 4)) * scale});
  }
  const Moments moments = MomentsOf(values);
  EXPECT_NEAR(moments.mean / moments.deviation, 0, 0.03);
  EXPECT_NEAR(moments.deviation * std::sqrt(96), 1, 0.4);  // scales are powers of two
}

TEST(MakeModelTest, LeavesFoldersAloneThatHoldSomething) {
  const TempFolder folder;
  folder.Write("precious.txt", "x");
  const absl::Status made = MakeModel(Small(), folder.path());
  EXPECT_EQ(made.code(), absl::StatusCode::kAlreadyExists) << made;
  EXPECT_THAT(std::string(made.message()), HasSubstr(folder.path()));
  EXPECT_FALSE(std::filesystem::exists(folder / "config.json"));
}

TEST(MakeModelTest, RefusesOptionsThatNoModelHas) {
  const struct {
    const char* named;
    void (*change)(MakeModelOptions&);
  } kCases[] = {
      {"num_hidden_layers", [](MakeModelOptions& o) { o.layers = 0; }},
      {"hidden_size", [](MakeModelOptions& o) { o.hidden = -1; }},
      {"hidden_size", [](MakeModelOptions& o) { o.hidden = INT64_MAX; }},
      {"intermediate_size", [](MakeModelOptions& o) { o.intermediate = -5; }},
      {"num_attention_heads", [](MakeModelOptions& o) { o.q_heads = 0; }},
      {"num_key_value_heads", [](MakeModelOptions& o) { o.kv_heads = 3; }},
      {"head_dim", [](MakeModelOptions& o) { o.head_dim = 7; }},
      {"vocab_size", [](MakeModelOptions& o) { o.vocab = 0; }},
      {"max_position_embeddings", [](MakeModelOptions& o) { o.context_tokens = 0; }},
      {"sliding_window", [](MakeModelOptions& o) { o.sliding_window = 8; }},  // in a Llama
      {"experts", [](MakeModelOptions& o) { o.experts = 8; }},                // likewise
      {"sliding_window",
       [](MakeModelOptions& o) {
         o.family = ModelFamily::kMistral;
         o.sliding_window = -8;
       }},
      {"mxfp4", [](MakeModelOptions& o) { o.dtype = DType::kF4E2M1; }},  // likewise
      {"rope_theta", [](MakeModelOptions& o) { o.rope_theta = NAN; }},
      {"rope_theta", [](MakeModelOptions& o) { o.rope_theta = 0; }},
      {"shard_bytes", [](MakeModelOptions& o) { o.shard_bytes = 0; }},
  };
  for (const auto& [named, change] : kCases) {
    SCOPED_TRACE(named);
    const TempFolder folder;
    MakeModelOptions options = Small();
    change(options);
    const absl::Status made = MakeModel(options, folder / "model");
    EXPECT_EQ(made.code(), absl::StatusCode::kInvalidArgument) << made;
    EXPECT_THAT(std::string(made.message()), HasSubstr(named));
    EXPECT_FALSE(std::filesystem::exists(folder / "model"));
  }
}

}  // namespace
}  // namespace meshfill
