#include "engine/model/layer_shape.h"

#include <algorithm>

namespace meshfill {

LayerShape LayerShapeOf(const ModelShape& model, int64_t window) {
  return {.hidden = model.hidden,
          .intermediate = model.intermediate,
          .q_heads = model.q_heads,
          .kv_heads = model.kv_heads,
          .head_dim = model.head_dim,
          .window = window,
          .dtype = model.dtype};
}

LayerShape LayerShapeOf(const ModelConfig& config, int layer) {
  LayerShape shape = LayerShapeOf(config.shape, config.layer_window[layer]);
  shape.qkv_bias = config.qkv_bias;
  shape.o_bias = config.o_bias;
  shape.mlp_bias = config.mlp_bias;
  shape.qk_norm = config.qk_norm;
  return shape;
}

std::vector<LayerTensor> LayerTensors(const LayerShape& shape) {
  const int64_t hidden = shape.hidden;
  std::vector<LayerTensor> tensors = {
      {LayerPart::kAttentionNorm, "input_layernorm", hidden, 0},
      {LayerPart::kQkv, "self_attn.q_proj", shape.q_width(), hidden, shape.qkv_bias},
      {LayerPart::kQkv, "self_attn.k_proj", shape.kv_width(), hidden, shape.qkv_bias},
      {LayerPart::kQkv, "self_attn.v_proj", shape.kv_width(), hidden, shape.qkv_bias},
  };
  if (shape.qk_norm) {
    tensors.push_back({LayerPart::kQNorm, "self_attn.q_norm", shape.head_dim, 0});
    tensors.push_back({LayerPart::kKNorm, "self_attn.k_norm", shape.head_dim, 0});
  }
  tensors.insert(tensors.end(),
                 {
                     {LayerPart::kO, "self_attn.o_proj", hidden, shape.q_width(), shape.o_bias},
                     {LayerPart::kMlpNorm, "post_attention_layernorm", hidden, 0},
                     {LayerPart::kGateUp, "mlp.gate_proj", shape.intermediate, hidden, shape.mlp_bias},
                     {LayerPart::kGateUp, "mlp.up_proj", shape.intermediate, hidden, shape.mlp_bias},
                     {LayerPart::kDown, "mlp.down_proj", hidden, shape.intermediate, shape.mlp_bias},
                 });
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
  for (const LayerTensor& tensor : LayerTensors(shape)) elements += tensor.out_features * tensor.in_features;
  return elements;
}

double LayerTokenFlops(const LayerShape& shape) {
  return 2.0 * static_cast<double>(LayerMatrixElements(shape));
}

double LayerPairFlops(const LayerShape& shape) { return 4.0 * shape.head_dim * shape.q_heads; }

SliceWidths SliceWidthsOf(const LayerShape& shape) {
  return {.normed = shape.hidden,
          .wide = std::max(shape.qkv_width(), 2 * shape.intermediate),
          .narrow = std::max(shape.q_width(), shape.intermediate)};
}

}  // namespace meshfill
