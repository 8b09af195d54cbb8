#include "engine/model/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "tests/engine/model/hf_folder.h"
#include "tests/engine/temp_folder.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr char kLayer1[] = "model.layers.1.";
constexpr WeightMode kModes[] = {WeightMode::kResident, WeightMode::kStreamed};

absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder,
                                            std::optional<DType> dtype = std::nullopt) {
  std::unique_ptr<Device> device;  // the model may outlive it
  return Model::Load(folder, dtype, [&](const ModelShape& shape) {
    device = MakeReferenceDevice(shape.dtype);
    return device.get();
  });
}

// A model whose weights are all there, or are read when they are asked for.
struct Held {
  std::unique_ptr<Device> device;
  absl::StatusOr<std::unique_ptr<Model>> model = absl::UnknownError("");
};
Held LoadAs(WeightMode mode, const std::string& folder) {
  Held held;
  held.model = Model::Load(folder, DType::kF32, [&](const ModelShape& shape) {
    held.device = MakeReferenceDevice(shape.dtype);
    return WeightPlace(held.device.get(), mode);
  });
  return held;
}

// A small good model as a folder in memory.
HfFolder Good(ModelFamily family = ModelFamily::kLlama, DType dtype = DType::kF32, bool tied = false) {
  const TempFolder folder;
  MakeModelOptions options;
  options.family = family;
  options.hidden = 16;
  options.intermediate = 24;
  options.q_heads = 4;
  options.kv_heads = 2;
  options.head_dim = 6;
  options.vocab = 11;
  options.tied_embeddings = tied;
  options.dtype = dtype;
  const absl::Status made = MakeModel(options, folder.path());
  EXPECT_TRUE(made.ok()) << made;
  return HfFolder::Read(folder.path());
}

struct BadModel {
  std::string what;
  std::function<void(HfFolder&)> damage;
  std::vector<std::string> named;
};

// Each is refused in one line that says where, and names what is wrong.
void ExpectRefusedByName(const HfFolder& good, std::span<const BadModel> cases) {
  for (const BadModel& bad : cases) {
    SCOPED_TRACE(bad.what);
    const TempFolder folder;
    HfFolder content = good;
    bad.damage(content);
    content.Write(folder.path());
    const auto model = Load(folder.path());
    ASSERT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument) << model.status();
    const std::string message(model.status().message());
    EXPECT_THAT(message, HasSubstr(folder.path()));
    for (const std::string& named : bad.named) EXPECT_THAT(message, HasSubstr(named));
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

void Reshape(HfFolder& folder, const std::string& name, std::vector<int64_t> shape) {
  HfTensor& tensor = folder.tensors.at(name);
  int64_t bytes = ElementTypeBytes(tensor.type);
  for (const int64_t extent : shape) bytes *= extent;
  tensor.shape = std::move(shape);
  tensor.bytes.resize(static_cast<size_t>(bytes));
}

// Rows and bias of a packed f32 weight, read back by multiplying: row r of the answer is output feature r,
// [out_features, in_features + 1], the bias last.
std::vector<std::vector<float>> Unpack(const PackedWeight& weight) {
  const int64_t in = weight.in_features(), out = weight.out_features();
  std::vector<float> x((in + 1) * in, 0.0f), y((in + 1) * out);
  for (int64_t i = 0; i < in; ++i) x[i * in + i] = 1;  // the unit vectors, then zero
  const LoneStream reference = ReferenceStream(DType::kF32);
  EXPECT_TRUE(reference->Gemm({&weight, x.data(), in + 1, y.data(), DType::kF32}).ok());
  std::vector<std::vector<float>> rows(out, std::vector<float>(in + 1));
  for (int64_t o = 0; o < out; ++o) {
    rows[o][in] = y[in * out + o];
    for (int64_t i = 0; i < in; ++i) rows[o][i] = y[i * out + o];
  }
  return rows;
}

// The linear layer's matrix, times its scales where it is in FP8.
std::vector<float> MatrixOf(const HfFolder& folder, const std::string& name) {
  const HfTensor& matrix = folder.tensors.at(name + ".weight");
  std::vector<float> values = matrix.Floats();
  if (matrix.type != ElementType::kF8E4M3) return values;
  const bool blocks = folder.tensors.contains(name + ".weight_scale_inv");
  const HfTensor& scales = folder.tensors.at(name + (blocks ? ".weight_scale_inv" : ".weight_scale"));
  const std::vector<float> factors = scales.Floats();
  size_t rows = 1, columns = SIZE_MAX;
  if (blocks) {
    const json& size = folder.config.at("quantization_config").at("weight_block_size");
    rows = size.at(0);
    columns = size.at(1);
  }
  const auto width = static_cast<size_t>(matrix.shape[1]), stride = static_cast<size_t>(scales.shape[1]);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] *= factors[i / width / rows * stride + i % width / columns];
  }
  return values;
}

// `packed` holds the named linear layers of `folder`, stacked in this order.
void ExpectRows(const std::vector<std::vector<float>>& rows, const HfFolder& folder,
                const std::vector<std::string>& names) {
  size_t row = 0;
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const HfTensor& matrix = folder.tensors.at(name + ".weight");
    const auto bias = folder.tensors.find(name + ".bias");
    const std::vector<float> expected = MatrixOf(folder, name);
    const size_t in = static_cast<size_t>(matrix.shape[1]);
    for (int64_t o = 0; o < matrix.shape[0]; ++o, ++row) {
      ASSERT_LT(row, rows.size());
      ASSERT_EQ(rows[row].size(), in + 1);
      const float b = bias == folder.tensors.end() ? 0 : bias->second.Floats()[o];
      ASSERT_EQ(rows[row][in], b) << "bias of row " << o;
      for (size_t i = 0; i < in; ++i) {
        ASSERT_NEAR(rows[row][i], expected[o * in + i] + b, 1e-6) << "row " << o;
      }
    }
  }
  EXPECT_EQ(row, rows.size());
}

void ExpectStacked(const PackedWeight& packed, const HfFolder& folder,
                   const std::vector<std::string>& names) {
  ExpectRows(Unpack(packed), folder, names);
}

void ExpectEmbeds(const Model& model, const HfFolder& folder) {
  std::vector<uint32_t> ids(static_cast<size_t>(model.shape().vocab));
  std::iota(ids.begin(), ids.end(), 0u);
  std::vector<float> x(ids.size() * static_cast<size_t>(model.shape().hidden));
  const LoneStream reference = ReferenceStream(DType::kF32);
  const absl::Status status = model.Embed(*reference, ids, x.data());
  EXPECT_TRUE(status.ok()) << status;
  std::vector<float> expected = folder.tensors.at("model.embed_tokens.weight").Floats();
  for (float& value : expected) value *= static_cast<float>(model.config().embedding_scale);
  EXPECT_EQ(x, expected);
}

// A norm's weight as it counts.
std::vector<float> NormOf(const Model& model, const HfFolder& folder, const std::string& name) {
  std::vector<float> weight = folder.tensors.at(name + ".weight").Floats();
  for (float& value : weight) value += model.config().norm_offset;
  return weight;
}

const WeightPart& Part(WeightFeed& feed, int part) {
  const auto taken = feed.Take(0, part, absl::Minutes(1));
  EXPECT_TRUE(taken.ok()) << taken.status();
  return **taken;
}

void ExpectHolds(const Model& model, const HfFolder& folder) {
  ExpectEmbeds(model, folder);
  EXPECT_EQ(model.final_norm().values(), NormOf(model, folder, "model.norm"));
  const std::unique_ptr<WeightFeed> feed = model.OpenFeed(1, /*with_head=*/true, nullptr);
  for (int i = 0; i < model.shape().layers; ++i) {
    const LayerWeights& layer = Part(*feed, i).layer;
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    SCOPED_TRACE(prefix);
    const auto norm = [&](bool there, const char* name) {
      return there ? NormOf(model, folder, prefix + name) : std::vector<float>();
    };
    const bool post_norms = model.shape().post_norms, qk_norm = model.config().qk_norm != QkNorm::kNone;
    EXPECT_EQ(layer.attention_norm.values(), norm(true, "input_layernorm"));
    EXPECT_EQ(layer.attention_post_norm.values(), norm(post_norms, "post_attention_layernorm"));
    EXPECT_EQ(layer.mlp_norm.values(),
              norm(true, post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm"));
    EXPECT_EQ(layer.mlp_post_norm.values(), norm(post_norms, "post_feedforward_layernorm"));
    EXPECT_EQ(layer.q_norm.values(), norm(qk_norm, "self_attn.q_norm"));
    EXPECT_EQ(layer.k_norm.values(), norm(qk_norm, "self_attn.k_norm"));
    using Names = std::vector<std::string>;
    const bool fused = model.config().fused_projections;
    ExpectStacked(
        *layer.qkv, folder,
        fused ? Names{prefix + "self_attn.qkv_proj"}
              : Names{prefix + "self_attn.q_proj", prefix + "self_attn.k_proj", prefix + "self_attn.v_proj"});
    ExpectStacked(*layer.o, folder, {prefix + "self_attn.o_proj"});
    if (model.config().layers[i].mlp == MlpKind::kExperts) continue;  // ExpectHoldsExperts
    ExpectStacked(
        *layer.gate_up, folder,
        fused ? Names{prefix + "mlp.gate_up_proj"} : Names{prefix + "mlp.gate_proj", prefix + "mlp.up_proj"});
    ExpectStacked(*layer.down, folder, {prefix + "mlp.down_proj"});
  }
  std::vector<std::vector<float>> head;
  for (int part = model.shape().layers; part < model.parts(); ++part) {
    for (std::vector<float>& row : Unpack(*Part(*feed, part).head)) head.push_back(std::move(row));
  }
  ExpectRows(head, folder, {folder.tensors.contains("lm_head.weight") ? "lm_head" : "model.embed_tokens"});
}

// The experts of one layer, by what the family calls their three matrices.
void ExpectHoldsExperts(const Model& model, int layer, const HfFolder& folder, const std::string& mlp,
                        const std::array<std::string, 3>& gate_up_down) {
  const std::unique_ptr<WeightFeed> feed = model.OpenFeed(1, /*with_head=*/false, nullptr);
  const ExpertWeights& experts = Part(*feed, layer).layer.experts;
  const std::string prefix = "model.layers." + std::to_string(layer) + "." + mlp + ".";
  ExpectStacked(*experts.router, folder, {prefix + "gate"});
  ASSERT_EQ(experts.gate_up.size(), static_cast<size_t>(model.shape().experts.count));
  ASSERT_EQ(experts.down.size(), experts.gate_up.size());
  for (size_t expert = 0; expert < experts.gate_up.size(); ++expert) {
    const std::string of_expert = prefix + "experts." + std::to_string(expert) + ".";
    ExpectStacked(*experts.gate_up[expert], folder,
                  {of_expert + gate_up_down[0], of_expert + gate_up_down[1]});
    ExpectStacked(*experts.down[expert], folder, {of_expert + gate_up_down[2]});
  }
}

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

// What a tensor is, the tensor says: some of the layers' matrices may be wide. Memory is then counted as if
// all were.
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
  EXPECT_EQ((*model)->shape().fp8.rows, 0);
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

std::vector<BadModel> BadModels() {
  const std::string layer = kLayer1;
  std::vector<BadModel> bad = {
      {"a tensor too many",
       [](HfFolder& f) {
         f.tensors["model.layers.2.mlp.up_proj.weight"] = {ElementType::kF32, {0}, {}};
       },
       {"\"model.layers.2.mlp.up_proj.weight\"", "not in the model"}},
      {"a bias that the config does not have",
       [layer](HfFolder& f) {
         f.tensors[layer + "self_attn.q_proj.bias"] = {ElementType::kF32, {24}, std::vector<std::byte>(96)};
       },
       {layer + "self_attn.q_proj.bias", "not in the model"}},
      {"K as wide as Q",
       [layer](HfFolder& f) {
         Reshape(f, layer + "self_attn.k_proj.weight", {24, 16});
       },
       {layer + "self_attn.k_proj.weight", "[24, 16]", "[12, 16]"}},
      {"a matrix on its side",
       [layer](HfFolder& f) {
         Reshape(f, layer + "mlp.down_proj.weight", {24, 16});
       },
       {layer + "mlp.down_proj.weight", "[24, 16]", "[16, 24]"}},
      {"a norm in two dimensions",
       [](HfFolder& f) {
         Reshape(f, "model.norm.weight", {16, 1});
       },
       {"\"model.norm.weight\"", "[16, 1]", "[16]"}},
      {"another vocabulary",
       [](HfFolder& f) { f.config["vocab_size"] = 12; },
       {"\"model.embed_tokens.weight\"", "[11, 16]", "[12, 16]"}},
      {"another head_dim",
       [](HfFolder& f) { f.config["head_dim"] = 4; },
       {"q_proj.weight", "[24, 16]", "[16, 16]"}},
      {"more layers",
       [](HfFolder& f) { f.config["num_hidden_layers"] = 3; },
       {"\"model.layers.2.input_layernorm.weight\"", "missing"}},
      {"fewer layers",
       [](HfFolder& f) { f.config["num_hidden_layers"] = 1; },
       {"\"model.layers.1.", "not in the model"}},
      {"biases that are not there",
       [](HfFolder& f) { f.config["mlp_bias"] = true; },
       {"gate_proj.bias", "missing"}},
      {"integers",
       [layer](HfFolder& f) { f.tensors.at(layer + "mlp.up_proj.weight").type = ElementType::kI32; },
       {layer + "mlp.up_proj.weight", "I32", "BF16"}},
      {"a tied head of its own",
       [](HfFolder& f) {
         f.config["tie_word_embeddings"] = true;
         f.tensors.at("lm_head.weight").bytes[3] ^= std::byte{1};
       },
       {"\"lm_head.weight\"", "tie_word_embeddings"}},
      {"an unknown config key",
       [](HfFolder& f) { f.config["logit_scale"] = 0.5; },
       {"config.json", "\"logit_scale\"", "0.5"}},
  };
  for (const std::string name :
       {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight"}) {
    bad.push_back(
        {"no " + name, [name](HfFolder& f) { f.tensors.erase(name); }, {"\"" + name + "\"", "missing"}});
  }
  return bad;
}

TEST(ModelTest, RefusesBrokenModelsByName) {
  const HfFolder good = Good();
  ExpectRefusedByName(good, BadModels());
}

TEST(ModelTest, MissingPartsAreNotFound) {
  const TempFolder folder;
  EXPECT_EQ(Load(folder / "none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Load(folder.path()).status().code(), absl::StatusCode::kNotFound);
  Good().Write(folder.path());
  std::filesystem::remove(folder / "config.json");
  const auto model = Load(folder.path());
  EXPECT_EQ(model.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("config.json"));
}

TEST(ModelTest, RefusesCutWeightsAndBrokenConfigs) {
  const TempFolder folder;
  Good().Write(folder.path());
  const std::string weights = ReadWholeFile(folder / "model.safetensors");
  folder.Write("model.safetensors", weights.substr(0, weights.size() - 1));
  EXPECT_EQ(Load(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
  folder.Write("model.safetensors", weights);
  folder.Write("config.json", "{\"model_type\": ");
  const auto model = Load(folder.path());
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("config.json"));
}

}  // namespace
}  // namespace meshfill
