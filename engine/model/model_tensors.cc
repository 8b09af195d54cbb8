#include "engine/model/model_tensors.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/quantization_config.h"
#include "engine/model/stacked_rows.h"
#include "engine/model/strict_json.h"
#include "engine/model/tensor_finder.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Stacks the layers' rows into one packed weight.
absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Device& device, std::span<const FoundLinear> linears,
                                                   const Fp8Blocks& blocks, const BeforeRead& before_read) {
  ASSIGN_OR_RETURN(const std::unique_ptr<StackedRows> stacked, StackedRows::Of(linears, blocks, before_read));
  return device.PackWeight(stacked->rows(), WidthOf(linears));
}

ElementKind KindOf(const FoundWeight& matrix, const Fp8Blocks& blocks) {
  switch (matrix.dtype) {
    case DType::kF8E4M3:
      return {.dtype = matrix.dtype,
              .scale_columns = std::min(blocks.columns, matrix.entry->tensor.shape[1])};
    case DType::kF4E2M1:
      return {.dtype = matrix.dtype, .scale_columns = kMxBlock};
    default:
      return {};
  }
}

// Bytes [begin, end) of the image, whose matrices are stacked from `linears_of`.
absl::StatusOr<BufferRef> PackBytes(
    Device& device, const WeightImage& image, int64_t begin, int64_t end, const Fp8Blocks& blocks,
    const BeforeRead& before_read,
    const std::function<std::span<const FoundLinear>(const WeightImage::Matrix&)>& linears_of) {
  ASSIGN_OR_RETURN(BufferRef bytes, device.Allocate(static_cast<size_t>(end - begin)));
  for (const WeightImage::Matrix& matrix : image.matrices) {
    const int64_t from = std::max(begin, matrix.begin) - matrix.begin;
    const int64_t until = std::min(end, matrix.begin + matrix.form.bytes) - matrix.begin;
    if (from >= until) continue;
    const int64_t first = from / matrix.form.panel_bytes;
    const int64_t panels = (until + matrix.form.panel_bytes - 1) / matrix.form.panel_bytes - first;
    ASSIGN_OR_RETURN(const std::unique_ptr<StackedRows> stacked,
                     StackedRows::Of(linears_of(matrix), blocks, before_read));
    ASSIGN_OR_RETURN(const BufferRef packed,
                     device.PackPanels(stacked->rows(), matrix.in_features, first, panels));
    const auto size_bytes = static_cast<size_t>(until - from);
    const BufferCopy copy = {
        .from = PartOf(packed, static_cast<size_t>(from - matrix.form.ByteOf(first)), size_bytes),
        .to = PartOf(bytes, static_cast<size_t>(matrix.begin + from - begin), size_bytes)};
    RETURN_IF_ERROR(device.Copy({&copy, 1}));
  }
  return bytes;
}

// Whether one of the part's matrices is not in FP8.
bool IsWide(const FoundLayer& layer, LayerPart part) {
  const std::vector<std::vector<FoundLinear>>& copies = layer.at(part);
  return std::any_of(copies.begin(), copies.end(), [](const std::vector<FoundLinear>& linears) {
    return linears.front().matrix.dtype != DType::kF8E4M3;  // all of them are of one kind
  });
}

// Each element and `offset`.
absl::StatusOr<PlacedVector> PlaceVector(Device& device, const FoundWeight& weight, float offset,
                                         const BeforeRead& before_read) {
  ASSIGN_OR_RETURN(std::vector<float> values, ToFloats(weight, before_read));
  for (float& value : values) value += offset;
  return PlacedVector::Make(device, std::move(values));
}

}  // namespace

absl::StatusOr<std::unique_ptr<const ModelTensors>> ModelTensors::Find(const std::string& folder,
                                                                       bool check_values) {
  ASSIGN_OR_RETURN(SafetensorsFolder weights, SafetensorsFolder::Open(folder));
  const std::string config_path = (std::filesystem::path(folder) / "config.json").string();
  ASSIGN_OR_RETURN(const std::string config_text, ReadJsonText(config_path));
  ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_text, config_path));

  std::unique_ptr<ModelTensors> found(new ModelTensors(std::move(weights)));
  TensorFinder finder(found->folder_, config, found->parts_, check_values);
  found->embedding_ = finder.Find("model.embed_tokens.weight", {config.shape.vocab, config.shape.hidden});
  found->layers_.reserve(static_cast<size_t>(config.shape.layers));
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    found->layers_.push_back(finder.FindLayer(layer));
  }
  for (int layer = 0; layer < config.unused_layers; ++layer) {
    finder.Ignore(absl::StrCat("model.layers.", config.shape.layers + layer, "."));
  }
  found->final_norm_ = finder.Find("model.norm.weight", {config.shape.hidden});
  const absl::StatusOr<FoundWeight> lm_head = finder.FindLmHead(found->embedding_);
  RETURN_IF_ERROR(finder.Finish());
  if (!lm_head.ok()) return lm_head.status();
  found->lm_head_ = *lm_head;
  found->all_f32_ = finder.all_f32();
  if (config.fp8.scales != nullptr) {
    SetFp8([&](int layer, const LayerTensor& tensor) { return IsWide(found->layers_[layer], tensor.part); },
           config);
  }
  found->config_ = std::move(config);
  return found;
}

absl::StatusOr<LayerWeights> ModelTensors::PackLayer(Device& device, int layer,
                                                     const BeforeRead& before_read) const {
  return MakeLayer(device, layer, before_read, [&](LayerPart, int, const std::vector<FoundLinear>& linears) {
    return Pack(device, linears, config_.fp8.blocks, before_read);
  });
}

absl::StatusOr<LayerWeights> ModelTensors::MakeLayer(Device& device, int layer, const BeforeRead& before_read,
                                                     const Packer& pack) const {
  const FoundLayer& found = layers_[layer];
  LayerWeights weights;
  ExpertWeights& experts = weights.experts;
  const std::pair<LayerPart, PlacedVector*> vectors[] = {
      {LayerPart::kAttentionNorm, &weights.attention_norm},
      {LayerPart::kAttentionPostNorm, &weights.attention_post_norm},
      {LayerPart::kMlpNorm, &weights.mlp_norm},
      {LayerPart::kMlpPostNorm, &weights.mlp_post_norm},
      {LayerPart::kQNorm, &weights.q_norm},
      {LayerPart::kKNorm, &weights.k_norm},
      {LayerPart::kSinks, &weights.sinks},
      {LayerPart::kRouterCorrection, &experts.correction}};
  for (const auto& [part, vector] : vectors) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    const bool is_norm = part != LayerPart::kSinks && part != LayerPart::kRouterCorrection;
    const float offset = is_norm ? config_.norm_offset : 0;
    ASSIGN_OR_RETURN(*vector, PlaceVector(device, copies->second[0][0].matrix, offset, before_read));
  }
  const std::pair<LayerPart, std::unique_ptr<PackedWeight>*> products[] = {
      {LayerPart::kQkv, &weights.qkv},
      {LayerPart::kO, &weights.o},
      {LayerPart::kGateUp, &weights.gate_up},
      {LayerPart::kDown, &weights.down},
      {LayerPart::kRouter, &experts.router},
      {LayerPart::kSharedGateUp, &experts.shared_gate_up},
      {LayerPart::kSharedDown, &experts.shared_down}};
  for (const auto& [part, packed] : products) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    ASSIGN_OR_RETURN(*packed, pack(part, 0, copies->second[0]));
  }
  const std::pair<LayerPart, std::vector<std::unique_ptr<PackedWeight>>*> by_expert[] = {
      {LayerPart::kExpertGateUp, &experts.gate_up}, {LayerPart::kExpertDown, &experts.down}};
  for (const auto& [part, packed] : by_expert) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    for (size_t copy = 0; copy < copies->second.size(); ++copy) {
      ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> expert,
                       pack(part, static_cast<int>(copy), copies->second[copy]));
      packed->push_back(std::move(expert));
    }
  }
  return weights;
}

SafetensorsFolder::Entry ModelTensors::HeadRows(int64_t first, int64_t rows) const {
  SafetensorsFolder::Entry part = *lm_head_.entry;
  const size_t row_bytes = static_cast<size_t>(config_.shape.hidden) * DTypeBytes(lm_head_.dtype);
  part.tensor.shape[0] = rows;
  part.tensor.bytes = part.tensor.bytes.subspan(first * row_bytes, rows * row_bytes);
  return part;
}

absl::StatusOr<std::unique_ptr<PackedWeight>> ModelTensors::PackHead(Device& device, int64_t first,
                                                                     int64_t rows,
                                                                     const BeforeRead& before_read) const {
  const SafetensorsFolder::Entry part = HeadRows(first, rows);
  const FoundLinear head[] = {{{&part, lm_head_.dtype}, {}, {}}};
  return Pack(device, head, {}, before_read);
}

absl::StatusOr<WeightImage> ModelTensors::LayerImage(Device& device, int layer) const {
  WeightImage image;
  for (const auto& [part, copies] : layers_[layer]) {
    if (copies[0][0].matrix.entry->tensor.shape.size() != 2) continue;  // a vector
    for (size_t copy = 0; copy < copies.size(); ++copy) {
      RETURN_IF_ERROR(image.Add(device, part, static_cast<int>(copy), StackedOutFeatures(copies[copy]),
                                WidthOf(copies[copy]), KindOf(copies[copy][0].matrix, config_.fp8.blocks)));
    }
  }
  return image;
}

absl::StatusOr<WeightImage> ModelTensors::HeadImage(Device& device, int64_t rows) const {
  WeightImage image;
  RETURN_IF_ERROR(image.Add(device, LayerPart{}, 0, rows, config_.shape.hidden, {}));
  return image;
}

absl::StatusOr<BufferRef> ModelTensors::PackLayerBytes(Device& device, int layer, const WeightImage& image,
                                                       int64_t begin, int64_t end,
                                                       const BeforeRead& before_read) const {
  return PackBytes(device, image, begin, end, config_.fp8.blocks, before_read,
                   [&](const WeightImage::Matrix& matrix) {
                     return std::span<const FoundLinear>(layers_[layer].at(matrix.part)[matrix.copy]);
                   });
}

absl::StatusOr<BufferRef> ModelTensors::PackHeadBytes(Device& device, int64_t first, const WeightImage& image,
                                                      int64_t begin, int64_t end,
                                                      const BeforeRead& before_read) const {
  const SafetensorsFolder::Entry part = HeadRows(first, image.matrices.front().out_features);
  const FoundLinear head[] = {{{&part, lm_head_.dtype}, {}, {}}};
  return PackBytes(device, image, begin, end, {}, before_read,
                   [&](const WeightImage::Matrix&) { return std::span<const FoundLinear>(head); });
}

absl::StatusOr<LayerWeights> ModelTensors::LayerOf(Device& device, int layer, const WeightImage& image,
                                                   const BufferRef& bytes,
                                                   const BeforeRead& before_read) const {
  auto next = image.matrices.begin();
  const auto pack =
      [&](LayerPart part, int copy,
          const std::vector<FoundLinear>& linears) -> absl::StatusOr<std::unique_ptr<PackedWeight>> {
    const auto is_it = [&](const WeightImage::Matrix& matrix) {
      return matrix.part == part && matrix.copy == copy;
    };
    // Mostly the next one: MakeLayer and the image have them in nearly the same order.
    if (next == image.matrices.end() || !is_it(*next)) {
      next = std::find_if(image.matrices.begin(), image.matrices.end(), is_it);
    }
    const WeightImage::Matrix& matrix = *next++;
    ASSIGN_OR_RETURN(std::vector<float> bias, StackedBias(linears, before_read));
    return device.WeightOf(
        matrix.out_features, matrix.in_features, matrix.kind,
        PartOf(bytes, static_cast<size_t>(matrix.begin), static_cast<size_t>(matrix.form.bytes)),
        std::move(bias));
  };
  return MakeLayer(device, layer, before_read, pack);
}

absl::StatusOr<PlacedVector> ModelTensors::PlaceFinalNorm(Device& device) const {
  return PlaceVector(device, final_norm_, config_.norm_offset, FillPageCache);
}

}  // namespace meshfill
