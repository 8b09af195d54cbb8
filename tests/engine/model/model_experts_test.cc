// Experts that a model has loaded, of each family and in MXFP4, against the files' own; and broken ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/model/loaded_model.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

TEST(ModelTest, HoldsTheExperts) {
  const struct {
    ModelFamily family;
    int first_layer;
    std::string mlp;
    std::array<std::string, 3> names;
    std::string correction;  // "": none
    bool shared;
  } families[] = {
      {ModelFamily::kQwen3Moe, 0, "mlp", {"gate_proj", "up_proj", "down_proj"}, "", false},
      {ModelFamily::kMixtral, 0, "block_sparse_moe", {"w1", "w3", "w2"}, "", false},
      {ModelFamily::kGlm4Moe,
       1,
       "mlp",
       {"gate_proj", "up_proj", "down_proj"},
       "gate.e_score_correction_bias",
       true},
      {ModelFamily::kMiniMaxM2, 0, "block_sparse_moe", {"w1", "w3", "w2"}, "e_score_correction_bias", false},
  };
  for (const auto& [family, first_layer, mlp, names, correction, shared] : families) {
    SCOPED_TRACE(FamilyOf(family).name);
    const TempFolder folder;
    HfFolder good = Good(family);
    if (family == ModelFamily::kGlm4Moe) {  // layers for further tokens, which a prefill does not need
      good.config["num_nextn_predict_layers"] = 1;
      good.tensors["model.layers.2.enorm.weight"] = good.tensors.at("model.norm.weight");
    }
    if (family == ModelFamily::kMiniMaxM2) {
      good.config["num_mtp_modules"] = 2;
      good.tensors["model.layers.3.enorm.weight"] = good.tensors.at("model.norm.weight");
    }
    good.Write(folder.path());
    for (const WeightMode mode : kModes) {
      const auto [device, model] = LoadAs(mode, folder.path());
      ASSERT_TRUE(model.ok()) << model.status();
      ExpectHolds(**model, good);
      for (int layer = first_layer; layer < 2; ++layer) {
        ExpectHoldsExperts(**model, layer, good, mlp, names);
      }
    }
    const auto model = Load(folder.path(), DType::kF32);
    ASSERT_TRUE(model.ok()) << model.status();
    const std::unique_ptr<WeightFeed> feed = (*model)->OpenFeed(1, /*with_head=*/false, nullptr);
    for (int layer = first_layer; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + "." + mlp + ".";
      const ExpertWeights& experts = Part(*feed, layer).layer.experts;
      EXPECT_EQ(experts.correction.values(),
                correction.empty() ? std::vector<float>() : good.tensors.at(prefix + correction).Floats());
      ASSERT_EQ(experts.shared_gate_up != nullptr, shared);
      if (!shared) continue;
      ExpectStacked(*experts.shared_gate_up, good,
                    {prefix + "shared_experts.gate_proj", prefix + "shared_experts.up_proj"});
      ExpectStacked(*experts.shared_down, good, {prefix + "shared_experts.down_proj"});
    }
  }
}

// Expert `copy` of a tensor [experts, in_features, out_features] and of its biases.
void ExpectStackedExpert(const PackedWeight& packed, const HfFolder& folder, const std::string& name,
                         size_t copy) {
  const HfTensor& tensor = folder.tensors.at(name);
  const std::vector<float> values = tensor.Floats(), biases = folder.tensors.at(name + "_bias").Floats();
  const auto in = static_cast<size_t>(tensor.shape[1]), out = static_cast<size_t>(tensor.shape[2]);
  const std::vector<std::vector<float>> rows = Unpack(packed);
  ASSERT_EQ(rows.size(), out) << name;
  for (size_t o = 0; o < out; ++o) {
    ASSERT_EQ(rows[o].size(), in + 1) << name;
    const float bias = biases[copy * out + o];
    ASSERT_EQ(rows[o][in], bias) << name;
    for (size_t i = 0; i < in; ++i) {
      ASSERT_NEAR(rows[o][i], values[(copy * in + i) * out + o] + bias, 1e-6) << name;
    }
  }
}

TEST(ModelTest, HoldsTheSinksAndExpertsOfGptOss) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    const TempFolder folder;
    const HfFolder good = Good(ModelFamily::kGptOss, dtype);
    good.Write(folder.path());
    for (const WeightMode mode : kModes) {
      const auto [device, model] = LoadAs(mode, folder.path());
      ASSERT_TRUE(model.ok()) << model.status();
      ExpectHolds(**model, good);
      const std::unique_ptr<WeightFeed> feed = (*model)->OpenFeed(1, /*with_head=*/false, nullptr);
      for (int i = 0; i < 2; ++i) {
        const LayerWeights& layer = Part(*feed, i).layer;
        const std::string prefix = "model.layers." + std::to_string(i) + ".";
        EXPECT_EQ(layer.sinks.values(), good.tensors.at(prefix + "self_attn.sinks").Floats());
        ExpectStacked(*layer.experts.router, good, {prefix + "mlp.router"});
        ASSERT_EQ(layer.experts.gate_up.size(), 8u);
        ASSERT_EQ(layer.experts.down.size(), 8u);
        for (size_t expert = 0; expert < 8; ++expert) {
          ExpectStackedExpert(*layer.experts.gate_up[expert], good, prefix + "mlp.experts.gate_up_proj",
                              expert);
          ExpectStackedExpert(*layer.experts.down[expert], good, prefix + "mlp.experts.down_proj", expert);
        }
      }
    }
  }
}

HfFolder GoodInMxfp4() {
  const TempFolder folder;
  MakeModelOptions options;
  options.family = ModelFamily::kGptOss;
  options.hidden = 64;
  options.intermediate = 32;
  options.experts = 3;
  options.vocab = 11;
  options.dtype = DType::kF4E2M1;
  const absl::Status made = MakeModel(options, folder.path());
  EXPECT_TRUE(made.ok()) << made;
  return HfFolder::Read(folder.path());
}

TEST(ModelTest, HoldsExpertsInMxfp4) {
  const TempFolder folder;
  const HfFolder good = GoodInMxfp4();
  good.Write(folder.path());
  for (const WeightMode mode : kModes) {
    const auto [device, model] = LoadAs(mode, folder.path());
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE((*model)->shape().fp4_experts);
    ExpectHolds(**model, good);
    const std::unique_ptr<WeightFeed> feed = (*model)->OpenFeed(1, /*with_head=*/false, nullptr);
    const ExpertWeights& experts = Part(*feed, 1).layer.experts;
    for (size_t expert = 0; expert < 3; ++expert) {
      for (const auto& [packed, matrix] :
           {std::pair(experts.gate_up[expert].get(), "gate_up"), {experts.down[expert].get(), "down"}}) {
        const std::string name = std::string(kLayer1) + "mlp.experts." + matrix + "_proj";
        const std::vector<float> biases = good.tensors.at(name + "_bias").Floats();
        const std::vector<std::byte>&blocks = good.tensors.at(name + "_blocks").bytes,
              &scales = good.tensors.at(name + "_scales").bytes;
        const auto in = static_cast<size_t>(packed->in_features()),
                   out = static_cast<size_t>(packed->out_features());
        const std::vector<std::vector<float>> rows = Unpack(*packed);
        for (size_t o = 0; o < out; ++o) {
          const float bias = biases[expert * out + o];
          ASSERT_EQ(rows[o][in], bias);
          for (size_t i = 0; i < in; ++i) {
            const size_t at = (expert * out + o) * in + i;
            const auto bits =
                static_cast<uint8_t>(static_cast<uint8_t>(blocks[at / 2]) >> (i % 2 == 0 ? 0 : 4));
            const float scale = std::ldexp(1.0f, static_cast<int>(scales[at / 32]) - 127);
            ASSERT_NEAR(rows[o][i], Fp4ToFloat(bits) * scale + bias, 1e-6) << name;
          }
        }
      }
    }
  }
}

// Of a model whose other matrices are all in f32, too.
TEST(ModelTest, ExpertsInMxfp4AreNotF32) {
  HfFolder content = GoodInMxfp4();
  for (auto& [name, tensor] : content.tensors) {
    if (tensor.type != ElementType::kBf16) continue;
    tensor.type = ElementType::kF32;
    tensor.bytes.assign(2 * tensor.bytes.size(), std::byte{0});
  }
  const TempFolder folder;
  content.Write(folder.path());
  const auto model = Load(folder.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->shape().dtype, DType::kBf16);
}

TEST(ModelTest, RefusesBrokenMxfp4ByName) {
  const std::string down = std::string(kLayer1) + "mlp.experts.down_proj";
  const BadModel kCases[] = {
      {"no scales", [&](HfFolder& f) { f.tensors.erase(down + "_scales"); }, {down + "_scales", "missing"}},
      {"scales of other blocks",
       [&](HfFolder& f) {
         Reshape(f, down + "_scales", {3, 64, 2});
       },
       {down + "_scales", "[3, 64, 2]", "[3, 64, 1]"}},
      {"a scale that is no number",
       [&](HfFolder& f) { f.tensors.at(down + "_scales").bytes[7] = std::byte{255}; },
       {down + "_scales", "nan for a scale, at 7"}},
      {"a scale that overflows",
       [&](HfFolder& f) { f.tensors.at(down + "_scales").bytes[9] = std::byte{126 + 127}; },
       {down + "_scales", "2^126 for a scale, at 9", "up to 2^125"}},
      {"scales of another dtype",
       [&](HfFolder& f) { f.tensors.at(down + "_scales").type = ElementType::kI8; },
       {down + "_scales", "I8", "U8"}},
      {"blocks of 8 bytes",
       [&](HfFolder& f) {
         Reshape(f, down + "_blocks", {3, 64, 2, 8});
       },
       {down + "_blocks", "[3, 64, 2, 8]", "[3, 64, 1, 16]"}},
      {"blocks of another dtype",
       [&](HfFolder& f) { f.tensors.at(down + "_blocks").type = ElementType::kI8; },
       {down + "_blocks", "I8", "U8"}},
      {"experts in both forms",
       [&](HfFolder& f) {
         f.tensors[down] = {ElementType::kF32, {3, 32, 64}, std::vector<std::byte>(3 * 32 * 64 * 4)};
       },
       {down, "not in the model"}},
      {"what the config does not say",
       [&](HfFolder& f) { f.config.erase("quantization_config"); },
       {"gate_up_proj", "missing"}},
  };
  ExpectRefusedByName(GoodInMxfp4(), kCases);
}

TEST(ModelTest, RefusesABrokenGptOssByName) {
  const std::string sinks = std::string(kLayer1) + "self_attn.sinks",
                    gate_up = std::string(kLayer1) + "mlp.experts.gate_up_proj";
  const BadModel kCases[] = {
      {"no sinks", [&](HfFolder& f) { f.tensors.erase(sinks); }, {sinks, "missing", "[4]"}},
      {"sinks of the KV heads", [&](HfFolder& f) { Reshape(f, sinks, {2}); }, {sinks, "[2]", "[4]"}},
      {"a sink that is no number",
       [&](HfFolder& f) {
         const float nan = NAN;
         std::memcpy(&f.tensors.at(sinks).bytes[8], &nan, sizeof(nan));
       },
       {sinks, "nan for a sink, at 2"}},
      {"experts on their side",
       [&](HfFolder& f) {
         Reshape(f, gate_up, {8, 48, 16});
       },
       {gate_up, "[8, 48, 16]", "[8, 16, 48]"}},
      {"fewer experts",
       [&](HfFolder& f) {
         Reshape(f, gate_up, {7, 16, 48});
       },
       {gate_up, "[7, 16, 48]", "[8, 16, 48]"}},
      {"no biases", [&](HfFolder& f) { f.tensors.erase(gate_up + "_bias"); }, {gate_up + "_bias", "missing"}},
      {"experts as integers",
       [&](HfFolder& f) { f.tensors.at(gate_up).type = ElementType::kI32; },
       {gate_up, "I32"}},
      {"more experts used than there are",
       [](HfFolder& f) { f.config["num_experts_per_tok"] = 9; },
       {"\"num_experts_per_tok\"", "9"}},
  };
  ExpectRefusedByName(Good(ModelFamily::kGptOss), kCases);
}

TEST(ModelTest, RefusesBrokenExpertsByName) {
  const std::string name = "model.layers.1.mlp.experts.4.down_proj.weight";
  const auto refused = [](const HfFolder& content) {
    const TempFolder folder;
    content.Write(folder.path());
    const auto model = Load(folder.path());
    EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument) << model.status();
    return std::string(model.status().message());
  };
  HfFolder missing = Good(ModelFamily::kQwen3Moe);
  missing.tensors.erase(name);
  EXPECT_THAT(refused(missing), testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("is missing"),
                                               testing::HasSubstr("[16, 24]")));
  HfFolder misshapen = Good(ModelFamily::kQwen3Moe);
  misshapen.tensors.at(name).shape = {24, 16};
  EXPECT_THAT(refused(misshapen),
              testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("has the shape [24, 16]")));
  HfFolder one_more = Good(ModelFamily::kQwen3Moe);
  one_more.tensors["model.layers.1.mlp.experts.8.down_proj.weight"] = one_more.tensors.at(name);
  EXPECT_THAT(refused(one_more), testing::AllOf(testing::HasSubstr("experts.8.down_proj"),
                                                testing::HasSubstr("is not in the model")));
}

}  // namespace
}  // namespace meshfill
