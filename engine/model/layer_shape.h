// What one layer of a transformer is, in numbers: its tensors, its FLOPs, and the buffers that a slice of
// tokens is computed in. layer.h computes it, the planner predicts it, make-model invents its weights: all
// from this one description.
#ifndef MESHFILL_ENGINE_MODEL_LAYER_SHAPE_H_
#define MESHFILL_ENGINE_MODEL_LAYER_SHAPE_H_

#include <cstdint>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/model/model_shape.h"
#include "kernels/dtype.h"

namespace meshfill {

enum class MlpKind { kDense };  // down(silu(gate) · up)

struct LayerShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int64_t window = 0;  // tokens; 0: none
  MlpKind mlp = MlpKind::kDense;
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;       // RMSNorm per head of Q and K
  DType dtype = DType::kF32;  // compute dtype

  int64_t q_width() const { return int64_t{q_heads} * head_dim; }
  int64_t kv_width() const { return int64_t{kv_heads} * head_dim; }  // of K, and of V
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

// A layer of the model with this window, but for what its weights alone tell (biases, norms per head).
LayerShape LayerShapeOf(const ModelShape& model, int64_t window = 0);
// Layer `layer` of the model.
LayerShape LayerShapeOf(const ModelConfig& config, int layer);

// What a tensor of the layer is for. The linear layers of one part are stacked into one product.
enum class LayerPart { kAttentionNorm, kQkv, kQNorm, kKNorm, kO, kMlpNorm, kGateUp, kDown };

// A norm's weight, [out_features], or a linear layer's, [out_features, in_features], with its bias, if any.
struct LayerTensor {
  LayerPart part;
  const char* name;  // in the model's folder: "model.layers.<layer>.<name>.weight", and ".bias"
  int64_t out_features;
  int64_t in_features;  // 0: a norm
  bool bias = false;

  bool is_norm() const { return in_features == 0; }
};

// All tensors, in the order in which the layer uses them.
std::vector<LayerTensor> LayerTensors(const LayerShape& shape);

// The stacked matrix of one part.
struct ProductShape {
  int64_t out_features = 0;
  int64_t in_features = 0;
};
ProductShape ProductOf(const LayerShape& shape, LayerPart part);

// Elements of all matrices.
int64_t LayerMatrixElements(const LayerShape& shape);

// FLOPs, a multiply-add counted as two: of everything but attention for one token, and of attention for one
// visible (query, key) pair, all heads.
double LayerTokenFlops(const LayerShape& shape);
double LayerPairFlops(const LayerShape& shape);

// Elements for each token of a slice, all in the compute dtype. A slice's projections and its MLP are never
// needed at the same time, so they share what is wide.
struct SliceWidths {
  int64_t normed;  // after a norm
  int64_t wide;    // q, k, v; gate, up
  int64_t narrow;  // the gathered attention; silu(gate) · up

  int64_t all() const { return normed + wide + narrow; }
};
SliceWidths SliceWidthsOf(const LayerShape& shape);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_LAYER_SHAPE_H_
