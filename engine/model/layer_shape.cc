#include "engine/model/layer_shape.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/experts.h"

namespace meshfill {

LayerShape LayerShapeOf(const ModelShape& model, const LayerForm& form) {
  return {.hidden = model.hidden,
          .intermediate = model.intermediate,
          .q_heads = model.q_heads,
          .kv_heads = model.kv_heads,
          .head_dim = model.head_dim,
          .rotated_dim = model.rotated_dim(),
          .window = form.window,
          .mlp = form.mlp,
          .experts = model.experts,
          .router = {.experts = model.experts.count, .used = model.experts.used},
          .post_norms = model.post_norms,
          .activation = model.activation,
          .rope = form.rope,
          .fp8 = model.fp8,
          .wide = form.wide,
          .fp4_experts = model.fp4_experts,
          .dtype = model.dtype};
}

LayerShape LayerShapeOf(const ModelConfig& config, int layer) {
  LayerShape shape = LayerShapeOf(config.shape, config.layers[layer]);
  shape.router = config.router;
  shape.expert_names = config.expert_names;
  shape.router_correction = config.router_correction;
  shape.expert_bias = config.expert_bias;
  shape.swiglu_clamp = config.swiglu_clamp;
  shape.qkv_bias = config.qkv_bias;
  shape.o_bias = config.o_bias;
  shape.mlp_bias = config.mlp_bias;
  shape.fused_projections = config.fused_projections;
  shape.qk_norm = config.qk_norm;
  shape.sinks = config.sinks;
  return shape;
}

namespace {

std::string NameOf(const LayerTensor& tensor, int layer, int copy) {
  return absl::StrCat("model.layers.", layer, ".",
                      absl::StrReplaceAll(tensor.name, {{"*", absl::StrCat(copy)}}));
}

}  // namespace

std::string LayerTensor::WeightName(int layer, int copy) const {
  const bool whole = stacked || part == LayerPart::kRouterCorrection || part == LayerPart::kSinks;
  return absl::StrCat(NameOf(*this, layer, copy), whole ? "" : ".weight");
}

std::string LayerTensor::BiasName(int layer, int copy) const {
  return absl::StrCat(NameOf(*this, layer, copy), stacked ? "_bias" : ".bias");
}

std::string LayerTensor::ScalesName(int layer, int copy, const char* scales) const {
  return absl::StrCat(NameOf(*this, layer, copy), ".", scales);
}

namespace {

void AppendQkv(const LayerShape& shape, std::vector<LayerTensor>& tensors) {
  const int64_t hidden = shape.hidden;
  const bool bias = shape.qkv_bias;
  if (shape.fused_projections) {
    tensors.push_back({LayerPart::kQkv, "self_attn.qkv_proj", shape.qkv_width(), hidden, bias});
    return;
  }
  tensors.push_back({LayerPart::kQkv, "self_attn.q_proj", shape.q_width(), hidden, bias});
  tensors.push_back({LayerPart::kQkv, "self_attn.k_proj", shape.kv_width(), hidden, bias});
  tensors.push_back({LayerPart::kQkv, "self_attn.v_proj", shape.kv_width(), hidden, bias});
}

void AppendDenseMlp(const LayerShape& shape, std::vector<LayerTensor>& tensors) {
  const int64_t hidden = shape.hidden, width = shape.intermediate;
  const bool bias = shape.mlp_bias;
  if (shape.fused_projections) {
    tensors.push_back({LayerPart::kGateUp, "mlp.gate_up_proj", 2 * width, hidden, bias});
  } else {
    tensors.push_back({LayerPart::kGateUp, "mlp.gate_proj", width, hidden, bias});
    tensors.push_back({LayerPart::kGateUp, "mlp.up_proj", width, hidden, bias});
  }
  tensors.push_back({LayerPart::kDown, "mlp.down_proj", hidden, width, bias});
}

void AppendExperts(const LayerShape& shape, std::vector<LayerTensor>& tensors) {
  const ExpertNames& names = shape.expert_names;
  const auto& [count, used, width, shared_width] = shape.experts;
  const int64_t hidden = shape.hidden;
  const bool bias = shape.expert_bias;
  tensors.push_back({LayerPart::kRouter, names.router, count, hidden, bias});
  if (shape.router_correction) tensors.push_back({LayerPart::kRouterCorrection, names.correction, count, 0});
  if (shared_width > 0) {
    tensors.push_back({LayerPart::kSharedGateUp, names.shared_gate, shared_width, hidden});
    tensors.push_back({LayerPart::kSharedGateUp, names.shared_up, shared_width, hidden});
    tensors.push_back({LayerPart::kSharedDown, names.shared_down, hidden, shared_width});
  }
  const bool stacked = names.gate_up != nullptr;
  if (stacked) {
    tensors.push_back(
        {LayerPart::kExpertGateUp, names.gate_up, 2 * width, hidden, bias, count, used, stacked});
  } else {
    tensors.push_back({LayerPart::kExpertGateUp, names.gate, width, hidden, bias, count, used});
    tensors.push_back({LayerPart::kExpertGateUp, names.up, width, hidden, bias, count, used});
  }
  tensors.push_back({LayerPart::kExpertDown, names.down, hidden, width, bias, count, used, stacked});
}

}  // namespace

std::vector<LayerTensor> LayerTensors(const LayerShape& shape) {
  const int64_t hidden = shape.hidden;
  std::vector<LayerTensor> tensors = {{LayerPart::kAttentionNorm, "input_layernorm", hidden, 0}};
  AppendQkv(shape, tensors);
  if (shape.qk_norm != QkNorm::kNone) {
    const bool per_head = shape.qk_norm == QkNorm::kHead;
    tensors.push_back(
        {LayerPart::kQNorm, "self_attn.q_norm", per_head ? shape.head_dim : shape.q_width(), 0});
    tensors.push_back(
        {LayerPart::kKNorm, "self_attn.k_norm", per_head ? shape.head_dim : shape.kv_width(), 0});
  }
  if (shape.sinks) tensors.push_back({LayerPart::kSinks, "self_attn.sinks", shape.q_heads, 0});
  tensors.push_back({LayerPart::kO, "self_attn.o_proj", hidden, shape.q_width(), shape.o_bias});
  if (shape.post_norms)
    tensors.push_back({LayerPart::kAttentionPostNorm, "post_attention_layernorm", hidden, 0});
  tensors.push_back({LayerPart::kMlpNorm,
                     shape.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm", hidden, 0});
  if (shape.mlp == MlpKind::kDense) {
    AppendDenseMlp(shape, tensors);
  } else {
    AppendExperts(shape, tensors);
  }
  if (shape.post_norms) tensors.push_back({LayerPart::kMlpPostNorm, "post_feedforward_layernorm", hidden, 0});
  return tensors;
}

ProductShape ProductOf(const LayerShape& shape, LayerPart part) {
  ProductShape product;
  for (const LayerTensor& tensor : LayerTensors(shape)) {
    if (tensor.part != part) continue;
    product.out_features += tensor.out_features;
    product.in_features = tensor.in_features;
  }
  return product;
}

int64_t LayerMatrixElements(const LayerShape& shape) {
  int64_t elements = 0;
  for (const LayerTensor& tensor : LayerTensors(shape)) {
    if (!tensor.is_vector()) elements += tensor.elements();
  }
  return elements;
}

int64_t LayersMatrixElements(const ModelShape& model) {
  int64_t elements = 0;
  model.ForEachKind([&](const LayerForm& form, int layers) {
    elements += layers * LayerMatrixElements(LayerShapeOf(model, form));
  });
  return elements;
}

bool InFp8(const LayerShape& shape, const LayerTensor& tensor) {
  return shape.fp8.rows != 0 && tensor.may_be_fp8() && !shape.wide.Has(tensor.part);
}

namespace {

bool InFp4(const LayerShape& shape, const LayerTensor& tensor) {
  return shape.fp4_experts &&
         (tensor.part == LayerPart::kExpertGateUp || tensor.part == LayerPart::kExpertDown);
}

}  // namespace

int64_t LayerMatrixBytes(const LayerShape& shape, DType packed) {
  int64_t bytes = 0;
  for (const LayerTensor& tensor : LayerTensors(shape)) {
    if (tensor.is_vector()) continue;
    if (InFp4(shape, tensor)) {
      bytes += tensor.elements() / 2 + tensor.elements() / kMxBlock;
    } else if (!InFp8(shape, tensor)) {
      bytes += tensor.elements() * static_cast<int64_t>(DTypeBytes(packed));
    } else {  // with a scale for each row and block of columns, in f32 (kernels/cpu/narrow_matrix.h)
      const int64_t scales = tensor.out_features * shape.fp8.ScaleColumns(tensor.in_features);
      bytes += tensor.elements() + tensor.copies * scales * static_cast<int64_t>(sizeof(float));
    }
  }
  return bytes;
}

namespace {

// Elements of a layer's matrices in FP8 and MXFP4, by product.
std::map<LayerPart, int64_t> NarrowElements(const LayerShape& shape) {
  std::map<LayerPart, int64_t> elements;
  for (const LayerTensor& tensor : LayerTensors(shape)) {
    if (InFp8(shape, tensor) || InFp4(shape, tensor)) elements[tensor.part] += tensor.elements();
  }
  return elements;
}

}  // namespace

int64_t MostWidenedBytes(const ModelShape& model, DType packed) {
  int64_t most = 0;
  model.ForEachKind([&](const LayerForm& form, int) {
    int64_t of_layer = 0;
    for (const auto& [part, elements] : NarrowElements(LayerShapeOf(model, form))) of_layer += elements;
    most = std::max(most, of_layer);
  });
  return most * static_cast<int64_t>(DTypeBytes(packed));
}

int64_t MostWidenedProductBytes(const ModelShape& model, DType packed) {
  int64_t most = 0;
  model.ForEachKind([&](const LayerForm& form, int) {
    for (const auto& [part, elements] : NarrowElements(LayerShapeOf(model, form))) {
      most = std::max(most, elements);
    }
  });
  return most * static_cast<int64_t>(DTypeBytes(packed));
}

const char* WeightModeName(WeightMode mode) {
  switch (mode) {
    case WeightMode::kResident:
      return "resident";
    case WeightMode::kStreamed:
      return "streamed";
    case WeightMode::kSharded:
      return "sharded";
  }
  return "unknown";
}

WeightBytes WeightBytesOf(const ModelShape& model, DType packed) {
  WeightBytes bytes;
  model.ForEachKind([&](const LayerForm& form, int layers) {
    const int64_t layer = LayerMatrixBytes(LayerShapeOf(model, form), packed);
    bytes.layers += layers * layer;
    bytes.most_layer = std::max(bytes.most_layer, layer);
  });
  bytes.head = bytes.embedding = LmHeadBytes(model, packed);
  return bytes;
}

double LayerTokenFlops(const LayerShape& shape) {
  int64_t used = 0;
  for (const LayerTensor& tensor : LayerTensors(shape)) {
    used += tensor.used_copies * tensor.out_features * tensor.in_features;
  }
  return 2.0 * static_cast<double>(used);
}

SliceWidths SliceWidthsOf(const LayerShape& shape) {
  const auto f32_elements = static_cast<int64_t>(sizeof(float) / DTypeBytes(shape.dtype));
  SliceWidths widths = {.normed = shape.hidden, .wide = shape.qkv_width(), .narrow = shape.q_width()};
  if (shape.post_norms) widths.wide = std::max(widths.wide, shape.hidden * f32_elements);
  if (shape.mlp == MlpKind::kDense) {
    widths.wide = std::max(widths.wide, 2 * shape.intermediate);
    widths.narrow = std::max(widths.narrow, shape.intermediate);
    return widths;
  }
  const auto& [count, used, width, shared_width] = shape.experts;
  const int64_t logits = count * f32_elements;
  widths.wide = std::max({widths.wide, logits, 2 * shared_width, used * std::max(2 * width, shape.hidden)});
  widths.narrow = std::max({widths.narrow, shared_width, used * width});
  widths.experts = shape.experts;
  return widths;
}

SliceWidths SliceWidthsOf(const ModelShape& model) {
  SliceWidths most;
  model.ForEachKind([&](const LayerForm& form, int) {
    const SliceWidths widths = SliceWidthsOf(LayerShapeOf(model, form));
    most = {.normed = std::max(most.normed, widths.normed),
            .wide = std::max(most.wide, widths.wide),
            .narrow = std::max(most.narrow, widths.narrow),
            .experts = widths.experts.count > 0 ? widths.experts : most.experts};
  });
  return most;
}

int64_t SliceBytes(const SliceWidths& widths, int64_t tokens, DType dtype) {
  return tokens * (widths.normed + widths.wide + widths.narrow) * static_cast<int64_t>(DTypeBytes(dtype)) +
         ExpertRowsBytes(widths.experts.count, widths.experts.used, tokens);
}

}  // namespace meshfill
