// The dtype by which leader and workers know a model is the one that it is loaded in.
#include "server/pool/model_id.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "engine/model/make_model.h"
#include "engine/model/model.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

void MakeGptOss(const std::string& path) {
  ASSERT_TRUE(MakeModel({.family = ModelFamily::kGptOss,
                         .layers = 2,
                         .hidden = 16,
                         .intermediate = 24,
                         .q_heads = 4,
                         .kv_heads = 2,
                         .head_dim = 8,
                         .vocab = 11,
                         .dtype = DType::kF32},
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
  MakeGptOss(made.path());
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
  MakeGptOss(folder.path());
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
  MakeGptOss(folder.path());
  HfFolder content = HfFolder::Read(folder.path());
  content.tensors.erase("model.norm.weight");
  content.Write(folder.path());
  const absl::Status status = IdentifyModel(folder.path(), std::nullopt).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("\"model.norm.weight\" is missing"), std::string::npos) << status;
}

}  // namespace
}  // namespace meshfill
