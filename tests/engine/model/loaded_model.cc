#include "tests/engine/model/loaded_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/make_model.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/temp_folder.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::HasSubstr;

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

// `rows` are those of the named linear layers of `folder`, stacked in this order.
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

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder, std::optional<DType> dtype) {
  std::unique_ptr<Device> device;  // the model may outlive it
  return Model::Load(folder, dtype, [&](const ModelShape& shape) {
    device = MakeReferenceDevice(shape.dtype);
    return device.get();
  });
}

Held LoadAs(WeightMode mode, const std::string& folder) {
  Held held;
  held.model = Model::Load(folder, DType::kF32, [&](const ModelShape& shape) {
    held.device = MakeReferenceDevice(shape.dtype);
    return WeightPlace(held.device.get(), mode);
  });
  return held;
}

HfFolder Good(ModelFamily family, DType dtype, bool tied) {
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

void ExpectStacked(const PackedWeight& packed, const HfFolder& folder,
                   const std::vector<std::string>& names) {
  ExpectRows(Unpack(packed), folder, names);
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

}  // namespace meshfill
