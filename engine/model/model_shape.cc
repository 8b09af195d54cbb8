#include "engine/model/model_shape.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "engine/model/layer_shape.h"

namespace meshfill {

std::vector<LayerKind> LayerKindsOf(std::span<const LayerForm> layers) {
  std::map<LayerForm, int> counts;
  for (const LayerForm& form : layers) ++counts[form];
  std::vector<LayerKind> kinds;
  for (const auto& [form, count] : counts) kinds.push_back({.form = form, .layers = count});
  return kinds;
}

float ModelShape::score_scale() const {
  return 1.0f / std::sqrt(static_cast<float>(score_scalar == 0 ? head_dim : score_scalar));
}

int ModelShape::rope_count() const {
  std::set<LayerRope> ropes;
  ForEachKind([&](const LayerForm& form, int) { ropes.insert(form.rope); });
  return static_cast<int>(ropes.size());
}

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
  double pairs = 0;
  model.ForEachWindow([&](int64_t window, int layers) { pairs += layers * VisiblePairs(tokens, window); });
  return PairFlops(model.q_heads, model.head_dim) * pairs;
}

double ProjectionFlopsPerToken(const ModelShape& model) {
  double flops = 0;
  model.ForEachKind([&](const LayerForm& form, int layers) {
    flops += layers * LayerTokenFlops(LayerShapeOf(model, form));
  });
  return flops;
}

double LmHeadFlops(const ModelShape& model) {
  return 2.0 * static_cast<double>(model.hidden) * static_cast<double>(model.vocab);
}

double ModelFlops(const ModelShape& model, int64_t tokens) {
  return AttentionFlops(model, tokens) + static_cast<double>(tokens) * ProjectionFlopsPerToken(model) +
         LmHeadFlops(model);
}

}  // namespace meshfill
