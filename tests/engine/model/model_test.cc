// The weights that a model has loaded, of each dense family and dtype, against the files' own; and folders
// that are odd, but good.
#include "engine/model/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/make_model.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/model/loaded_model.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

using nlohmann::json;

TEST(ModelTest, HoldsTheWeightsOfEveryFamilyAndDType) {
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kMistral, ModelFamily::kQwen2,
                                   ModelFamily::kQwen3, ModelFamily::kPhi3, ModelFamily::kGemma3}) {
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const bool tied : {false, true}) {
        SCOPED_TRACE(testing::Message() << "family " << static_cast<int>(family) << ", " << DTypeName(dtype)
                                        << (tied ? ", tied" : ""));
        const TempFolder folder;
        const HfFolder good = Good(family, dtype, tied);
        good.Write(folder.path());
        for (const WeightMode mode : kModes) {
          const auto [device, model] = LoadAs(mode, folder.path());
          ASSERT_TRUE(model.ok()) << model.status();
          ExpectHolds(**model, good);
        }
      }
    }
  }
}

// As Gemma 3 ships from 4B on, and as transformers names its tensors in memory.
TEST(ModelTest, HoldsTheLanguageModelInsideAnother) {
  const struct {
    std::string model, lm_head, others;
  } kSpellings[] = {{"language_model.model.", "language_model.lm_head.", ""},
                    {"model.language_model.", "lm_head.", "model."}};
  for (const auto& [model_prefix, head_prefix, others] : kSpellings) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(model_prefix + (tied ? ", tied" : ""));
      const HfFolder alone = Good(ModelFamily::kGemma3, DType::kF32, tied);
      HfFolder inside = alone;
      inside.tensors.clear();
      for (const auto& [name, tensor] : alone.tensors) {
        const bool of_model = name.starts_with("model.");
        inside.tensors[of_model ? model_prefix + name.substr(6) : head_prefix + name.substr(8)] = tensor;
      }
      inside.tensors[others + "vision_tower.patch.weight"] = alone.tensors.at("model.norm.weight");
      inside.tensors[others + "multi_modal_projector.norm.weight"] = alone.tensors.at("model.norm.weight");
      json text = alone.config;
      text.erase("architectures");
      inside.config = {{"architectures", {"Gemma3ForConditionalGeneration"}},
                       {"model_type", "gemma3"},
                       {"text_config", text},
                       {"vision_config", {{"hidden_size", 8}}}};
      for (const WeightMode mode : kModes) {
        const TempFolder folder;
        inside.Write(folder.path());
        const auto [device, model] = LoadAs(mode, folder.path());
        ASSERT_TRUE(model.ok()) << model.status();
        ExpectHolds(**model, alone);
      }
      const std::string lost = model_prefix + "layers.1.mlp.up_proj.weight";
      ExpectRefusedByName(inside,
                          std::vector<BadModel>{{"a tensor that is missing",
                                                 [&](HfFolder& folder) { folder.tensors.erase(lost); },
                                                 {lost, "is missing"}},
                                                {"a tensor of nothing",
                                                 [&](HfFolder& folder) {
                                                   folder.tensors["audio_tower.weight"] =
                                                       alone.tensors.at("model.norm.weight");
                                                 },
                                                 {"audio_tower.weight", "is not in the model"}}});
    }
  }
}

// All biases at once, in f16, MQA; and shards with an index.
TEST(ModelTest, HoldsTheWeightsOfPublishedFolders) {
  for (const std::string name :
       {"llama_biases_mqa", "mistral_sharded_head_dim_32", "qwen3_bias_layer_types", "phi3_mqa_sharded"}) {
    SCOPED_TRACE(name);
    const std::string folder = std::string(MESHFILL_PARITY_DIR) + "/goldens/" + name;
    for (const WeightMode mode : kModes) {
      const auto [device, model] = LoadAs(mode, folder);
      ASSERT_TRUE(model.ok()) << model.status();
      ExpectHolds(**model, HfFolder::Read(folder));
    }
  }
}

TEST(ModelTest, ComputesInF32OnlyWhereAllMatricesAreF32) {
  const auto dtype_of = [](const HfFolder& content, std::optional<DType> asked) {
    const TempFolder folder;
    content.Write(folder.path());
    const auto model = Load(folder.path(), asked);
    EXPECT_TRUE(model.ok()) << model.status();
    return (*model)->shape().dtype;
  };
  EXPECT_EQ(dtype_of(Good(ModelFamily::kLlama, DType::kF32), std::nullopt), DType::kF32);
  EXPECT_EQ(dtype_of(Good(ModelFamily::kLlama, DType::kBf16), std::nullopt), DType::kBf16);
  EXPECT_EQ(dtype_of(Good(ModelFamily::kLlama, DType::kF16), std::nullopt), DType::kBf16);
  EXPECT_EQ(dtype_of(Good(ModelFamily::kLlama, DType::kBf16), DType::kF32), DType::kF32);
  EXPECT_EQ(dtype_of(Good(ModelFamily::kLlama, DType::kF32), DType::kBf16), DType::kBf16);
  HfFolder mixed = Good(ModelFamily::kLlama, DType::kBf16);
  for (auto& [name, tensor] : mixed.tensors) {
    if (tensor.shape.size() == 1) {
      tensor = {ElementType::kF32, tensor.shape, std::vector<std::byte>(2 * tensor.bytes.size())};
    }
  }
  EXPECT_EQ(dtype_of(mixed, std::nullopt), DType::kBf16);
}

// Whose rows are read some at a time, where weights stream.
TEST(ModelTest, EmbedsPromptsOfAnyLength) {
  const TempFolder folder;
  const HfFolder good = Good();
  good.Write(folder.path());
  const std::vector<float> table = good.tensors.at("model.embed_tokens.weight").Floats();
  const auto hidden = good.config.at("hidden_size").get<size_t>();
  std::mt19937_64 random(TestSeed());
  for (const WeightMode mode : kModes) {
    const auto [device, model] = LoadAs(mode, folder.path());
    ASSERT_TRUE(model.ok()) << model.status();
    const LoneStream stream = ReferenceStream(DType::kF32);
    for (const size_t tokens : {size_t{0}, size_t{1}, size_t{256}, size_t{257}, size_t{700}}) {
      std::vector<uint32_t> ids(tokens);
      for (uint32_t& id : ids) id = Draw<uint32_t>(random, 0, 10);
      std::vector<float> x(tokens * hidden), expected;
      for (const uint32_t id : ids) {
        const auto row = table.begin() + static_cast<std::ptrdiff_t>(id * hidden);
        expected.insert(expected.end(), row, row + static_cast<std::ptrdiff_t>(hidden));
      }
      const absl::Status status = (*model)->Embed(*stream, ids, x.data());
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(x, expected) << tokens << " tokens";
    }
  }
}

// The factor on Gemma's embeddings is a number of the compute dtype, as transformers has it.
TEST(ModelTest, TheEmbeddingsFactorIsRounded) {
  const TempFolder folder;
  MakeModelOptions options;
  options.family = ModelFamily::kGemma3;
  options.hidden = 48;
  options.vocab = 11;
  options.dtype = DType::kF32;
  ASSERT_TRUE(MakeModel(options, folder.path()).ok());
  const std::vector<float> table =
      HfFolder::Read(folder.path()).tensors.at("model.embed_tokens.weight").Floats();
  const auto root = static_cast<float>(std::sqrt(48.0));
  for (const auto& [dtype, factor] :
       {std::pair(DType::kF32, root), {DType::kBf16, BFloat16::FromFloat(root).ToFloat()}}) {
    const auto model = Load(folder.path(), dtype);
    ASSERT_TRUE(model.ok()) << model.status();
    const LoneStream stream = ReferenceStream(DType::kF32);
    const std::vector<uint32_t> ids = {0};
    std::vector<float> x(48);
    ASSERT_TRUE((*model)->Embed(*stream, ids, x.data()).ok());
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i], table[i] * factor) << DTypeName(dtype);
  }
}

// Nobody reads the LM head of a run without logits.
TEST(ModelTest, AFeedEndsWithWhatItsReadersNeed) {
  const TempFolder folder;
  Good().Write(folder.path());
  const auto [device, model] = LoadAs(WeightMode::kStreamed, folder.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weight_mode(), WeightMode::kStreamed);
  const std::unique_ptr<WeightFeed> feed = (*model)->OpenFeed(1, /*with_head=*/false, nullptr);
  EXPECT_EQ(feed->mode(), WeightMode::kStreamed);
  for (int layer = 0; layer < 2; ++layer) Part(*feed, layer);
  const absl::Status none = feed->Take(0, 2, absl::Milliseconds(30)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(none)) << none;
  EXPECT_NE(none.message().find("the LM head"), std::string::npos) << none;

  const auto resident = Load(folder.path());
  ASSERT_TRUE(resident.ok()) << resident.status();
  EXPECT_EQ((*resident)->weight_mode(), WeightMode::kResident);
  EXPECT_EQ((*resident)->OpenFeed(1, /*with_head=*/true, nullptr)->mode(), WeightMode::kResident);
}

// However they are held, weights come in the same parts: so do the bits of an LM head that is divided.
TEST(ModelTest, ResidentWeightsComeInThePartsOfThoseThatStream) {
  const TempFolder folder;
  ASSERT_TRUE(
      MakeModel({.layers = 2, .hidden = 16, .intermediate = 24, .q_heads = 2, .kv_heads = 1, .vocab = 1300},
                folder.path())
          .ok());
  const auto resident = LoadAs(WeightMode::kResident, folder.path());
  const auto streamed = LoadAs(WeightMode::kStreamed, folder.path());
  ASSERT_TRUE(resident.model.ok() && streamed.model.ok()) << resident.model.status();
  const int parts = (*resident.model)->parts();
  EXPECT_GT(parts, 3);
  ASSERT_EQ((*streamed.model)->parts(), parts);
  const auto stays = (*resident.model)->OpenFeed(1, true, nullptr),
             passes = (*streamed.model)->OpenFeed(1, true, nullptr);
  for (int part = 2; part < parts; ++part) {
    const auto expected = passes->Take(0, part, absl::Minutes(1)),
               got = stays->Take(0, part, absl::Minutes(1));
    ASSERT_TRUE(expected.ok() && got.ok()) << expected.status();
    EXPECT_EQ((*got)->head->out_features(), (*expected)->head->out_features()) << part;
  }
}

// Elements that were taken from a mapping would end the process by a signal.
TEST(ModelTest, AFileThatShrinksMeanwhileFailsTheLoad) {
  const TempFolder folder;
  Good().Write(folder.path());
  const std::string file = folder / "model.safetensors";
  std::unique_ptr<Device> device;
  const auto model = Model::Load(folder.path(), std::nullopt, [&](const ModelShape& shape) {
    std::filesystem::resize_file(file, 0);
    device = MakeReferenceDevice(shape.dtype);
    return device.get();
  });
  EXPECT_TRUE(absl::IsDataLoss(model.status())) << model.status();
  EXPECT_NE(model.status().message().find(file), std::string::npos) << model.status();
}

TEST(ModelTest, AcceptsATiedHeadThatIsTheEmbedding) {
  const TempFolder folder;
  HfFolder content = Good(ModelFamily::kLlama, DType::kF32, /*tied=*/true);
  content.tensors["lm_head.weight"] = content.tensors.at("model.embed_tokens.weight");
  content.Write(folder.path());
  const auto model = Load(folder.path());
  EXPECT_TRUE(model.ok()) << model.status();
}

TEST(ModelTest, AcceptsTheRopeFrequenciesOfOldExports) {
  const TempFolder folder;
  HfFolder content = Good();
  content.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
      ElementType::kF32, {3}, std::vector<std::byte>(12)};
  content.Write(folder.path());
  const auto model = Load(folder.path());
  EXPECT_TRUE(model.ok()) << model.status();
}

// The header of a file may have any length, and so its tensors may lie at odd addresses.
TEST(ModelTest, ReadsUnalignedFiles) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const TempFolder folder;
    const HfFolder content = Good(ModelFamily::kQwen2, dtype);
    content.Write(folder.path());
    std::string file = ReadWholeFile(folder / "model.safetensors");
    uint64_t header = 0;
    std::memcpy(&header, file.data(), sizeof(header));
    file.insert(sizeof(header) + header, " ");
    ++header;
    std::memcpy(file.data(), &header, sizeof(header));
    folder.Write("model.safetensors", file);
    for (const WeightMode mode : kModes) {
      const auto [device, model] = LoadAs(mode, folder.path());
      ASSERT_TRUE(model.ok()) << model.status();
      ExpectHolds(**model, content);
    }
  }
}

}  // namespace
}  // namespace meshfill
