// Weights in FP8 that a model has loaded, against the files' own; and broken ones.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/layer_shape.h"
#include "engine/model/model_tensors.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/model/loaded_model.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using nlohmann::json;

TEST(ModelTest, HoldsWeightsInFp8) {
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kQwen3Moe}) {
    for (const bool channels : {false, true}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(family) << (channels ? ", channels" : ", blocks"));
      HfFolder good = Good(family, DType::kF8E4M3);
      json& quantisation = good.config["quantization_config"];
      quantisation["weight_block_size"] = {5, 7};  // some of them cut at the edges
      if (channels) {
        const json weights = {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}};
        quantisation = {{"quant_method", "compressed-tensors"},
                        {"format", "float-quantized"},
                        {"config_groups", {{"group_0", {{"weights", weights}}}}}};
      }
      HfFolder content = good;
      std::mt19937 random(7);
      for (const auto& [name, tensor] : good.tensors) {
        if (!name.ends_with("_scale_inv")) continue;
        content.tensors.erase(name);
        const std::vector<int64_t>& shape = good.tensors.at(name.substr(0, name.size() - 10)).shape;
        const std::vector<int64_t> scales_shape =
            channels ? std::vector<int64_t>{shape[0], 1}
                     : std::vector<int64_t>{(shape[0] + 4) / 5, (shape[1] + 6) / 7};
        HfTensor scales = {ElementType::kF32, scales_shape, {}};
        for (int64_t i = 0; i < scales_shape[0] * scales_shape[1]; ++i) {
          const auto bits =
              std::bit_cast<std::array<std::byte, 4>>(static_cast<float>(random() % 100) * 1e-4f);
          scales.bytes.insert(scales.bytes.end(), bits.begin(), bits.end());
        }
        content.tensors[channels ? name.substr(0, name.size() - 4) : name] = std::move(scales);
      }
      const TempFolder folder;
      content.Write(folder.path());
      for (const WeightMode mode : kModes) {
        const auto [device, model] = LoadAs(mode, folder.path());
        ASSERT_TRUE(model.ok()) << model.status();
        ExpectHolds(**model, content);
        if (family == ModelFamily::kQwen3Moe) {
          ExpectHoldsExperts(**model, 1, content, "mlp", {"gate_proj", "up_proj", "down_proj"});
        }
        EXPECT_NE((*model)->shape().fp8.rows, 0);
      }
    }
  }
}

// One scale for all of a matrix, in a vector of its own.
TEST(ModelTest, HoldsWeightsInFp8WithAScaleForEach) {
  const HfFolder of_blocks = Good(ModelFamily::kLlama, DType::kF8E4M3);
  HfFolder content = of_blocks;
  const json weights = {{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}};
  content.config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                           {"format", "float-quantized"},
                                           {"config_groups", {{"group_0", {{"weights", weights}}}}}};
  HfFolder wide = content;
  for (const auto& [name, tensor] : of_blocks.tensors) {
    if (!name.ends_with(".weight_scale_inv")) continue;
    const std::string scale = name.substr(0, name.size() - 4), matrix = name.substr(0, name.size() - 10);
    content.tensors[scale] = {ElementType::kF32, {1}, tensor.bytes};  // of the one block
    content.tensors.erase(name);
    wide.tensors.erase(name);
    HfTensor& values = wide.tensors.at(matrix);
    std::vector<float> floats = values.Floats();
    values = {ElementType::kF32, values.shape, std::vector<std::byte>(4 * floats.size())};
    for (float& value : floats) value *= content.tensors.at(scale).Floats()[0];
    std::memcpy(values.bytes.data(), floats.data(), values.bytes.size());
  }
  const TempFolder folder;
  content.Write(folder.path());
  for (const WeightMode mode : kModes) {
    const auto [device, model] = LoadAs(mode, folder.path());
    ASSERT_TRUE(model.ok()) << model.status();
    ExpectHolds(**model, wide);
  }
}

// What a tensor is, the tensor says: some of the layers' matrices may be wide. Memory is counted product by
// product.
TEST(ModelTest, HoldsWeightsOfWhichSomeAreInFp8) {
  HfFolder content = Good(ModelFamily::kLlama, DType::kF8E4M3);
  const std::string name = std::string(kLayer1) + "self_attn.o_proj";
  HfTensor& matrix = content.tensors.at(name + ".weight");
  matrix = {ElementType::kF32, matrix.shape, std::vector<std::byte>(4 * matrix.bytes.size(), std::byte{60})};
  content.tensors.erase(name + ".weight_scale_inv");
  const TempFolder folder;
  content.Write(folder.path());
  const auto [device, model] = LoadAs(WeightMode::kResident, folder.path());
  ASSERT_TRUE(model.ok()) << model.status();
  ExpectHolds(**model, content);
  EXPECT_EQ((*model)->shape().fp8, (*model)->config().fp8.blocks);
  LayerParts o;
  o.Add(LayerPart::kO);
  for (const LayerForm& layer : (*model)->config().layers) {
    const bool is_it = &layer == &(*model)->config().layers[1];
    EXPECT_EQ(layer.wide, is_it ? o : LayerParts());
  }
  EXPECT_EQ((*model)->shape().kinds, LayerKindsOf((*model)->config().layers));
}

// What is planned for a model is what it takes, whatever of it is wide.
TEST(ModelTest, CountsTheBytesOfWeightsOfWhichSomeAreInFp8) {
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kQwen3Moe}) {
    HfFolder content = Good(family, DType::kF8E4M3);
    std::vector<std::string> wide = {std::string(kLayer1) + "self_attn.o_proj"};
    if (family == ModelFamily::kQwen3Moe) {
      for (auto& [name, tensor] : content.tensors) {
        if (name.starts_with(std::string(kLayer1) + "mlp.experts.") && name.ends_with("down_proj.weight")) {
          wide.push_back(name.substr(0, name.size() - 7));
        }
      }
    }
    for (const std::string& name : wide) {
      HfTensor& matrix = content.tensors.at(name + ".weight");
      matrix = {ElementType::kBf16, matrix.shape, std::vector<std::byte>(2 * matrix.bytes.size())};
      content.tensors.erase(name + ".weight_scale_inv");
    }
    const TempFolder folder;
    content.Write(folder.path());
    const auto tensors = ModelTensors::Find(folder.path());
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    const ModelConfig& config = (*tensors)->config();
    int64_t matrices = 0;  // as the folder has them, with a scale for each row of a block
    for (const auto& [name, tensor] : content.tensors) {
      if (!name.starts_with("model.layers.") || tensor.shape.size() != 2 || name.ends_with("_scale_inv"))
        continue;
      const bool fp8 = tensor.type == ElementType::kF8E4M3;
      const int64_t elements = tensor.shape[0] * tensor.shape[1];
      matrices += fp8 ? elements + 4 * tensor.shape[0] * config.fp8.blocks.ScaleColumns(tensor.shape[1])
                      : 2 * elements;
    }
    EXPECT_EQ(WeightBytesOf(config.shape, DType::kBf16).layers, matrices);
  }
}

TEST(ModelTest, RefusesBrokenFp8ByName) {
  const HfFolder good = Good(ModelFamily::kLlama, DType::kF8E4M3);
  const std::string q = std::string(kLayer1) + "self_attn.q_proj.weight", scales = q + "_scale_inv";
  const BadModel kCases[] = {
      {"scales of another shape",
       [&](HfFolder& f) {
         Reshape(f, scales, {1, 2});
       },
       {scales, "[1, 2]", "[1, 1]"}},
      {"no scales", [&](HfFolder& f) { f.tensors.erase(scales); }, {scales, "missing"}},
      {"a scale that is NaN",
       [&](HfFolder& f) { f.tensors.at(scales).bytes.assign(4, std::byte{0xff}); },
       {scales, "nan"}},
      {"scales of integers",
       [&](HfFolder& f) { f.tensors.at(scales).type = ElementType::kI32; },
       {scales, "I32"}},
      {"no word of FP8 in the config",
       [](HfFolder& f) { f.config.erase("quantization_config"); },
       {"model.layers.0.self_attn.q_proj.weight", "F8_E4M3", "quantization_config"}},
      {"a norm in FP8",
       [](HfFolder& f) {
         f.tensors.at("model.norm.weight") = {ElementType::kF8E4M3, {16}, std::vector<std::byte>(16)};
       },
       {"model.norm.weight", "F8_E4M3", "a layer's matrices"}},
      {"an embedding in FP8",
       [](HfFolder& f) {
         f.tensors.at("model.embed_tokens.weight") = {
             ElementType::kF8E4M3, {11, 16}, std::vector<std::byte>(176)};
       },
       {"model.embed_tokens.weight", "F8_E4M3"}},
      {"another kind of FP8",
       [&](HfFolder& f) { f.tensors.at(q).type = ElementType::kF8E5M2; },
       {q, "F8_E5M2"}},
      {"q wide, and k and v not",
       [&](HfFolder& f) {
         HfTensor& matrix = f.tensors.at(q);
         matrix = {ElementType::kBf16, matrix.shape, std::vector<std::byte>(2 * matrix.bytes.size())};
         f.tensors.erase(scales);
       },
       {"self_attn.k_proj.weight", "F8_E4M3", "BF16", "q, k and v"}},
      {"scales of what is wide",
       [&](HfFolder& f) {
         HfTensor& matrix = f.tensors.at(std::string(kLayer1) + "mlp.down_proj.weight");
         matrix = {ElementType::kBf16, matrix.shape, std::vector<std::byte>(2 * matrix.bytes.size())};
       },
       {"mlp.down_proj.weight_scale_inv", "not in the model"}},
  };
  ExpectRefusedByName(good, kCases);
}

}  // namespace
}  // namespace meshfill
