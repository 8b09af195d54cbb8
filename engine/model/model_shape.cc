#include "engine/model/model_shape.h"

#include <algorithm>

#include "engine/model/layer_shape.h"

namespace meshfill {

ModelShape ModelShape::HeadSlice(int h) const {
  ModelShape slice = *this;
  slice.q_heads = q_heads / h;
  slice.kv_heads = std::max(1, kv_heads / h);
  return slice;
}

double VisiblePairs(int64_t tokens, int64_t window) {
  const double n = static_cast<double>(tokens);
  if (window == 0 || window >= tokens) return n * (n + 1) / 2;
  const double w = static_cast<double>(window);
  return w * (w + 1) / 2 + (n - w) * w;  // the first w queries see 1 … w keys, each later one w
}

double AttentionFlops(const ModelShape& model, int64_t tokens) {
  const double pairs = model.windowed_layers * VisiblePairs(tokens, model.sliding_window) +
                       (model.layers - model.windowed_layers) * VisiblePairs(tokens, 0);
  return LayerPairFlops(LayerShapeOf(model)) * pairs;
}

double ProjectionFlopsPerToken(const ModelShape& model) {
  return model.layers * LayerTokenFlops(LayerShapeOf(model));
}

double LmHeadFlops(const ModelShape& model) {
  return 2.0 * static_cast<double>(model.hidden) * static_cast<double>(model.vocab);
}

double ModelFlops(const ModelShape& model, int64_t tokens) {
  return AttentionFlops(model, tokens) + static_cast<double>(tokens) * ProjectionFlopsPerToken(model) +
         LmHeadFlops(model);
}

}  // namespace meshfill
