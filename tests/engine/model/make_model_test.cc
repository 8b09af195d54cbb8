#include "engine/model/make_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/model.h"
#include "engine/model/safetensors_folder.h"
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
    EXPECT_EQ(config.norm_eps, 1e-6f);
    EXPECT_TRUE(config.tied_embeddings);
  }
}

// What a family's config.json says beside, as ModelConfig reads it.
ModelConfig ConfigOf(const MakeModelOptions& options) {
  const auto config = ModelConfig::Parse(Make(options).config.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

TEST(MakeModelTest, WritesWhatAFamilyHasOfItsOwn) {
  MakeModelOptions options = Small();
  options.family = ModelFamily::kGemma3;  // even two layers are of both kinds
  const ModelConfig gemma = ConfigOf(options);
  EXPECT_EQ(gemma.layers[0].window, 1024);
  EXPECT_EQ(gemma.layers[1].window, 0);
  EXPECT_EQ(gemma.local_rope.theta, 1e4);
  EXPECT_EQ(gemma.shape.score_scalar, 8);  // head_dim
  options.family = ModelFamily::kGptOss;
  const ModelConfig gpt_oss = ConfigOf(options);
  EXPECT_EQ(gpt_oss.layers[0].window, 128);
  EXPECT_EQ(gpt_oss.layers[1].window, 0);
  EXPECT_EQ(gpt_oss.rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(gpt_oss.rope.factor, 32);
  EXPECT_EQ(gpt_oss.rope.original_context_tokens, static_cast<double>(options.context_tokens) / 32);
  EXPECT_TRUE(gpt_oss.qkv_bias && gpt_oss.o_bias && !gpt_oss.rope.truncate);
  options.family = ModelFamily::kMistral;
  EXPECT_EQ(ConfigOf(options).layers[0].window, 0);
  options.family = ModelFamily::kGlm4Moe;
  const ModelConfig glm = ConfigOf(options);
  EXPECT_EQ(glm.layers[0].mlp, MlpKind::kDense);
  EXPECT_EQ(glm.layers[1].mlp, MlpKind::kExperts);
  EXPECT_EQ(glm.shape.experts.shared_width, glm.shape.experts.width);
  EXPECT_EQ(glm.shape.rotated_dim(), 4);  // half of a head
  EXPECT_EQ(glm.qk_norm, QkNorm::kHead);
  options.family = ModelFamily::kMiniMaxM2;
  EXPECT_EQ(ConfigOf(options).shape.rotated_dim(), 4);
  options.family = ModelFamily::kQwen3Moe;
  const ModelConfig qwen = ConfigOf(options);
  EXPECT_TRUE(qwen.router.normalised);
  EXPECT_EQ(qwen.shape.experts, (ExpertsShape{.count = 8, .used = 2, .width = 128}));  // as wide as an MLP

  options.family =
      ModelFamily::kPhi3;  // short factors of about 1; long ones that stretch as the context does
  for (const auto& [original, stretch] : {std::pair(1000, 8.0), {8000, 1.0}, {16000, 1.0}}) {
    options.context_tokens = 8000;
    options.original_context_tokens = original;
    const RopeConfig rope = ConfigOf(options).rope;
    ASSERT_EQ(rope.long_factors.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_FLOAT_EQ(rope.short_factors[i], 1 + static_cast<float>(i + 1) / 32);
      EXPECT_NEAR(rope.long_factors[i], std::pow(stretch, (i + 1) / 4.0), 1e-5) << original;
    }
  }
}

TEST(MakeModelTest, ShardsHoldTheSameTensors) {
  MakeModelOptions options = Small();
  const HfFolder whole = Make(options);
  const TempFolder folder;
  options.shard_bytes = 10000;
  ASSERT_TRUE(MakeModel(options, folder.path()).ok());
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
  // Each has as many tensors as fit, and one at least.
  const auto weights = SafetensorsFolder::Open(folder.path());
  ASSERT_TRUE(weights.ok()) << weights.status();
  std::map<std::string, std::pair<int, int64_t>> shards;  // tensors, bytes
  int64_t bytes = 0, largest = 0;
  for (const auto& [name, entry] : weights->entries()) {
    const int64_t of_tensor = std::ssize(entry.tensor.bytes);
    auto& [tensors, of_shard] = shards[entry.file->path()];
    ++tensors, of_shard += of_tensor;
    bytes += of_tensor;
    largest = std::max(largest, of_tensor);
  }
  EXPECT_GT(shards.size(), 2u);
  EXPECT_LE(std::ssize(shards),
            2 * bytes / options.shard_bytes + 1);  // neighbours have more than fits in one
  EXPECT_LT(largest, options.shard_bytes);
  for (const auto& [path, shard] : shards) EXPECT_LE(shard.second, options.shard_bytes) << path;
  const auto index = nlohmann::json::parse(ReadWholeFile(folder / "model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), bytes);
  const HfFolder sharded = HfFolder::Read(folder.path());
  ASSERT_EQ(sharded.tensors.size(), whole.tensors.size());
  for (const auto& [name, tensor] : whole.tensors) {
    EXPECT_EQ(tensor.bytes, sharded.tensors.at(name).bytes) << name;
  }
}

// No thread can have a stack that is larger than the address space.
TEST(MakeModelTest, OneThreadWritesAllShardsWhereNoOtherIsToBeHad) {
  MakeModelOptions options = Small();
  options.shard_bytes = 10000;
  const TempFolder folder;
  pthread_attr_t usual, too_large;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_attr_init(&too_large), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&too_large, size_t{1} << 47), 0);
  ASSERT_EQ(pthread_setattr_default_np(&too_large), 0);
  EXPECT_THROW(std::jthread([] {}), std::system_error);
  const absl::Status status = MakeModel(options, folder.path());
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(SafetensorsFolder::Open(folder.path()).ok());
}

// Files may have so many bytes while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_;
  void (*handler_)(int);
};

// The error is the first shard's that could not be written, whichever thread had it, and there is no index to
// load the rest by.
TEST(MakeModelTest, AShardThatCannotBeWrittenFailsTheModel) {
  MakeModelOptions options = Small();
  options.vocab = 400;  // two large shards, the first and the last: 400 · 32 elements
  options.shard_bytes = 12'000;
  const TempFolder folder;
  const FileSizeLimit limit(16'384);
  const absl::Status made = MakeModel(options, folder.path());
  EXPECT_EQ(made.code(), absl::StatusCode::kResourceExhausted) << made;
  EXPECT_THAT(std::string(made.message()), HasSubstr("model-00001-of-"));
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors.index.json"));
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

TEST(MakeModelTest, FamiliesHaveTheirNormsBiasesSinksAndTables) {
  MakeModelOptions options;
  options.dtype = DType::kF32;
  const auto moments = [](const HfFolder& model, const std::string& name) {
    return MomentsOf(model.tensors.at(name).Floats());
  };
  options.family = ModelFamily::kGemma3;  // norms multiply with 1 + weight, embeddings with √256
  const HfFolder gemma = Make(options);
  EXPECT_NEAR(moments(gemma, "model.norm.weight").mean, 0, 0.03);
  EXPECT_NEAR(moments(gemma, "model.embed_tokens.weight").deviation, 1 / 16.0, 0.001);
  EXPECT_NEAR(moments(gemma, "lm_head.weight").deviation, 1 / 16.0, 0.001);
  options.family = ModelFamily::kLlama;  // a table that is the LM head, too, is as small as that is
  options.tied_embeddings = true;
  EXPECT_NEAR(moments(Make(options), "model.embed_tokens.weight").deviation, 1 / 16.0, 0.001);
  options.family = ModelFamily::kGptOss;
  options.q_heads = 64;
  options.expert_width = 64;
  const HfFolder gpt_oss = Make(options);
  const std::string layer = "model.layers.1.";
  EXPECT_NEAR(moments(gpt_oss, layer + "self_attn.q_proj.bias").deviation, 0.1, 0.02);
  EXPECT_NEAR(moments(gpt_oss, layer + "mlp.experts.gate_up_proj_bias").deviation, 0.1, 0.02);
  EXPECT_NEAR(moments(gpt_oss, layer + "self_attn.sinks").deviation, 1, 0.4);
  EXPECT_NEAR(moments(gpt_oss, layer + "mlp.experts.gate_up_proj").deviation, 1 / 16.0, 0.001);
  EXPECT_NEAR(moments(gpt_oss, layer + "mlp.experts.down_proj").deviation, 1 / 8.0, 0.001);
}

// Also in tensors that are written in several pieces.
TEST(MakeModelTest, NumbersDoNotRepeat) {
  MakeModelOptions options;
  options.dtype = DType::kF32;
  options.layers = 1;
  const std::string name = "model.layers.0.mlp.gate_proj.weight";
  const std::vector<float> values = Make(options).tensors.at(name).Floats();
  ASSERT_GT(values.size(), size_t{2} << 16);
  size_t same = 0;
  for (size_t i = 1 << 16; i < values.size(); ++i) same += values[i] == values[i - (1 << 16)] ? 1 : 0;
  EXPECT_LT(same, values.size() / 1000);

  options.family = ModelFamily::kGptOss;
  options.dtype = DType::kF4E2M1;
  options.intermediate = 64;
  const std::vector<std::byte> bits =
      Make(options).tensors.at("model.layers.0.mlp.experts.gate_up_proj_blocks").bytes;
  ASSERT_GE(bits.size(), size_t{2} << 16);
  same = 0;
  for (size_t i = 1 << 16; i < bits.size(); ++i) same += bits[i] == bits[i - (1 << 16)] ? 1 : 0;
  EXPECT_LT(same, bits.size() / 50);
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

// It is drawn once in some 100,000 numbers.
TEST(MakeModelTest, ZeroStaysZero) {
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  MakeModelOptions options;
  options.layers = 1;
  options.hidden = 192;
  const auto values = [&](DType dtype) {
    options.dtype = dtype;
    return Make(options).tensors.at(name).Floats();
  };
  const std::vector<float> exact = values(DType::kF32), f16 = values(DType::kF16),
                           fp8 = values(DType::kF8E4M3);
  EXPECT_GT(std::count(exact.begin(), exact.end(), 0), 0);
  for (size_t i = 0; i < exact.size(); ++i) {
    if (exact[i] != 0) continue;
    EXPECT_EQ(f16[i], 0);
    EXPECT_EQ(fp8[i], 0);
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
  EXPECT_LT(factors.deviation, 0.3 * factors.mean);
  EXPECT_NEAR(elements.deviation, 112, 5);  // the range is used, and not left

  // The first matrix comes of the same numbers as in f32, at a quarter of the largest element.
  const std::string first = "model.layers.0.self_attn.q_proj.weight";
  options.dtype = DType::kF32;
  const std::vector<float> exact = Make(options).tensors.at(first).Floats(),
                           rounded = model.tensors.at(first).Floats();
  ASSERT_EQ(exact.size(), rounded.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    const double value = exact[i] * 112 * std::sqrt(192.0);
    int exponent = 0;
    std::frexp(value, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent, -5) - 4);  // of the last place
    ASSERT_LE(std::abs(rounded[i] - value), unit / 2 * (1 + 1e-4)) << value;
  }
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
  const auto [least, most] = std::minmax_element(scales.bytes.begin(), scales.bytes.end());
  EXPECT_NE(*least, *most);
  EXPECT_LE(static_cast<int>(*most) - static_cast<int>(*least), 5);
}

TEST(MakeModelTest, LeavesFoldersAloneThatHoldSomething) {
  const TempFolder folder;
  folder.Write("precious.txt", "x");
  const absl::Status made = MakeModel(Small(), folder.path());
  EXPECT_EQ(made.code(), absl::StatusCode::kAlreadyExists) << made;
  EXPECT_THAT(std::string(made.message()), HasSubstr(folder.path()));
  EXPECT_FALSE(std::filesystem::exists(folder / "config.json"));
  const absl::Status in_a_file = MakeModel(Small(), folder / "precious.txt/model");
  EXPECT_FALSE(in_a_file.ok() || absl::IsAlreadyExists(in_a_file)) << in_a_file;
  EXPECT_THAT(std::string(in_a_file.message()), HasSubstr("cannot be created"));
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
      {"experts_used", [](MakeModelOptions& o) { o.experts_used = 2; }},
      {"expert_width", [](MakeModelOptions& o) { o.expert_width = 64; }},
      {"original_context", [](MakeModelOptions& o) { o.original_context_tokens = 100; }},
      {"sliding_window",
       [](MakeModelOptions& o) {
         o.family = ModelFamily::kMistral;
         o.sliding_window = -8;
       }},
      {"mxfp4", [](MakeModelOptions& o) { o.dtype = DType::kF4E2M1; }},  // likewise
      {"dense_layers", [](MakeModelOptions& o) { o.dense_layers = 0; }},
      {"next_layers", [](MakeModelOptions& o) { o.next_layers = 1; }},
      {"fp8_scales", [](MakeModelOptions& o) { o.fp8_scales = Fp8Scales::kChannel; }},  // of bf16
      {"the 2 layers",
       [](MakeModelOptions& o) {
         o.family = ModelFamily::kQwen3Moe;
         o.dense_layers = 3;
       }},
      {"dense_layers must be from 0",
       [](MakeModelOptions& o) {
         o.family = ModelFamily::kGlm4Moe;
         o.dense_layers = -1;
       }},
      {"num_mtp_modules",
       [](MakeModelOptions& o) {
         o.family = ModelFamily::kMiniMaxM2;
         o.next_layers = 65;
       }},
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
