#include "engine/model/model_shape.h"

#include <algorithm>

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
  return 4.0 * model.head_dim * model.q_heads * pairs;
}

double ProjectionFlopsPerToken(const ModelShape& model) {
  const double hidden = static_cast<double>(model.hidden);
  const double qkv_and_o = hidden * model.head_dim * (2.0 * model.q_heads + 2.0 * model.kv_heads);
  const double mlp = 3.0 * hidden * static_cast<double>(model.intermediate);
  return 2.0 * model.layers * (qkv_and_o + mlp);
}

double LmHeadFlops(const ModelShape& model) {
  return 2.0 * static_cast<double>(model.hidden) * static_cast<double>(model.vocab);
}

double ModelFlops(const ModelShape& model, int64_t tokens) {
  return AttentionFlops(model, tokens) + static_cast<double>(tokens) * ProjectionFlopsPerToken(model) +
         LmHeadFlops(model);
}

}  // namespace meshfill
