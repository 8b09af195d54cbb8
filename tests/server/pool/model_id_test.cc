// The dtype by which leader and workers know a model is the one that it is loaded in.
#include "server/pool/model_id.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/make_model.h"
#include "engine/model/model.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

void MakeTiny(ModelFamily family, DType dtype, const std::string& path) {
  ASSERT_TRUE(MakeModel({.family = family,
                         .layers = 2,
                         .hidden = 16,
                         .intermediate = 24,
                         .q_heads = 4,
                         .kv_heads = 2,
                         .head_dim = 8,
                         .vocab = 11,
                         .dtype = dtype},
                        path)
                  .ok());
}

// Writes the tensor anew, as many elements of 0.
void ChangeTypeToBf16(HfTensor& tensor) {
  tensor.type = ElementType::kBf16;
  tensor.bytes.assign(tensor.bytes.size() / 2, std::byte{0});
}

DType LoadedDType(const std::string& folder) {
  std::unique_ptr<Device> device;
  const auto model = Model::Load(folder, std::nullopt, [&](const ModelShape& shape) {
    device = MakeReferenceDevice(shape.dtype);
    return device.get();
  });
  EXPECT_TRUE(model.ok()) << model.status();
  return (*model)->shape().dtype;
}

TEST(ModelIdTest, TheDTypeIsThatOfTheLoadedModel) {
  const TempFolder made;
  MakeTiny(ModelFamily::kGptOss, DType::kF32, made.path());
  const HfFolder f32 = HfFolder::Read(made.path());
  const struct {
    const char* changed;
    DType dtype;
  } kCases[] = {{nullptr, DType::kF32},
                {"model.layers.1.mlp.experts.down_proj", DType::kBf16},       // of three dimensions
                {"model.layers.0.mlp.experts.down_proj_bias", DType::kBf16},  // of two
                {"model.norm.weight", DType::kF32}};                          // of one: no matrix
  for (const auto& [changed, dtype] : kCases) {
    SCOPED_TRACE(changed == nullptr ? "all f32" : changed);
    const TempFolder folder;
    HfFolder content = f32;
    if (changed != nullptr) ChangeTypeToBf16(content.tensors.at(changed));
    content.Write(folder.path());
    const auto identified = IdentifyModel(folder.path(), std::nullopt);
    ASSERT_TRUE(identified.ok()) << identified.status();
    EXPECT_EQ(identified->shape.dtype, dtype);
    EXPECT_EQ(identified->id.dtype(), dtype == DType::kF32 ? "f32" : "bf16");
    EXPECT_EQ(LoadedDType(folder.path()), dtype);
    EXPECT_EQ(IdentifyModel(folder.path(), DType::kBf16)->id.dtype(), "bf16");
  }
}

TEST(ModelIdTest, NeedsNoWeights) {
  const TempFolder folder;
  MakeTiny(ModelFamily::kGptOss, DType::kF32, folder.path());
  const auto with = IdentifyModel(folder.path(), std::nullopt);
  std::filesystem::remove(folder / "model.safetensors");
  const auto without = IdentifyModel(folder.path(), std::nullopt);
  ASSERT_TRUE(with.ok() && without.ok()) << with.status() << without.status();
  EXPECT_NE(with->id.weights_hash(), 0u);
  EXPECT_EQ(without->id.weights_hash(), 0u);
  EXPECT_EQ(without->id.config_hash(), with->id.config_hash());
  EXPECT_EQ(without->shape, with->shape);
}

// The weights' errors are those of a worker that loads them.
TEST(ModelIdTest, RefusesWeightsOfAnotherModel) {
  const TempFolder folder;
  MakeTiny(ModelFamily::kGptOss, DType::kF32, folder.path());
  HfFolder content = HfFolder::Read(folder.path());
  content.tensors.erase("model.norm.weight");
  content.Write(folder.path());
  const absl::Status status = IdentifyModel(folder.path(), std::nullopt).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("\"model.norm.weight\" is missing"), std::string::npos) << status;
}

// A folder with one tensor of each of these sizes, in bytes, of f32 zeros.
void WriteZeros(const std::vector<size_t>& sizes, const std::string& path) {
  HfFolder content;
  content.config = nlohmann::json::object();
  for (size_t i = 0; i < sizes.size(); ++i) {
    content.tensors[absl::StrCat("t", i)] = {
        ElementType::kF32, {static_cast<int64_t>(sizes[i] / 4)}, std::vector<std::byte>(sizes[i])};
  }
  content.Write(path);
}

size_t SampledBytes(const SafetensorsFolder& folder) {
  size_t bytes = 0;
  for (const WeightSample& sample : WeightSamples(folder)) bytes += sample.bytes.size();
  return bytes;
}

TEST(ModelIdTest, WeightsAreSampledUpToABound) {
  constexpr size_t kMost = size_t{4} << 20;
  for (const std::vector<size_t>& sizes : {std::vector<size_t>{4, 4096, 100'000, 8},
                                           {kMost / 2, kMost / 2},
                                           {4 * kMost, 400, 2 * kMost + 40'004}}) {
    const TempFolder path;
    WriteZeros(sizes, path.path());
    const auto folder = SafetensorsFolder::Open(path.path());
    ASSERT_TRUE(folder.ok()) << folder.status();
    const size_t total = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
    const size_t sampled = SampledBytes(*folder);
    EXPECT_LE(sampled, std::min(total, kMost));
    EXPECT_GT(sampled, std::min(total, kMost) * 99 / 100);
    if (total <= kMost) {
      EXPECT_EQ(sampled, total);
    }
    // Spread: no more than a stride lies between two samples of a tensor, nor behind the last.
    const size_t stride = std::max<size_t>(4096, total / 1024 + 1);
    for (const auto& [name, entry] : folder->entries()) {
      const std::byte* read_to = entry.tensor.bytes.data();
      for (const WeightSample& sample : WeightSamples(*folder)) {
        if (sample.entry != &entry) continue;
        EXPECT_LE(sample.bytes.data() - read_to, stride) << name;
        read_to = sample.bytes.data() + sample.bytes.size();
      }
      EXPECT_LE(entry.tensor.bytes.data() + entry.tensor.bytes.size() - read_to, stride) << name;
    }
  }
}

TEST(ModelIdTest, ASampledByteChangesTheHash) {
  const TempFolder path;
  WriteZeros({9 << 20, 4096}, path.path());
  const std::string file = path / "model.safetensors";
  const auto hash = [&] {
    const auto folder = SafetensorsFolder::Open(path.path());
    return folder.ok() ? WeightsHash(*folder) : folder.status();
  };
  const absl::StatusOr<uint64_t> zeros = hash();
  ASSERT_TRUE(zeros.ok()) << zeros.status();
  EXPECT_EQ(*hash(), *zeros);
  std::vector<size_t> places;  // of the first, the middle and the last sample, from the file's end
  {
    const auto folder = SafetensorsFolder::Open(path.path());
    const std::vector<WeightSample> samples = WeightSamples(*folder);
    const std::byte* const end = folder->Find("t1")->tensor.bytes.data() + 4096;
    for (const size_t i : {size_t{0}, samples.size() / 2, samples.size() - 1}) {
      places.push_back(static_cast<size_t>(end - &samples[i].bytes.back()));
    }
  }
  for (const size_t place : places) {
    std::string content = ReadWholeFile(file);
    content[content.size() - place] = 1;
    std::ofstream(file, std::ios::binary) << content;
    EXPECT_NE(*hash(), *zeros) << place;
    content[content.size() - place] = 0;
    std::ofstream(file, std::ios::binary) << content;
    EXPECT_EQ(*hash(), *zeros);
  }
}

TEST(ModelIdTest, WeightsThatShrinkAreAnError) {
  const TempFolder path;
  WriteZeros({1 << 20}, path.path());
  const auto folder = SafetensorsFolder::Open(path.path());
  ASSERT_TRUE(folder.ok()) << folder.status();
  std::filesystem::resize_file(path / "model.safetensors", 1000);
  const absl::Status status = WeightsHash(*folder).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_NE(status.message().find("model.safetensors"), std::string::npos) << status;
}

// A plan without weights counts as much memory as one with them, as far as the config tells.
TEST(ModelIdTest, QuantizedModelsAreBf16WhereTheConfigSaysNoDType) {
  const TempFolder folder;
  MakeTiny(ModelFamily::kLlama, DType::kF8E4M3, folder.path());
  HfFolder content = HfFolder::Read(folder.path());
  content.config.erase("dtype");
  content.config.erase("torch_dtype");
  content.Write(folder.path());
  const auto with = IdentifyModel(folder.path(), std::nullopt);
  std::filesystem::remove(folder / "model.safetensors");
  const auto without = IdentifyModel(folder.path(), std::nullopt);
  ASSERT_TRUE(with.ok() && without.ok()) << with.status() << without.status();
  EXPECT_EQ(without->id.dtype(), "bf16");
  EXPECT_EQ(without->shape, with->shape);
}

}  // namespace
}  // namespace meshfill
