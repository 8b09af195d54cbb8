// What one layer of a transformer is, in numbers: its tensors, its FLOPs, and the buffers that a slice of
// tokens is computed in. layer.h computes it, the planner predicts it, make-model invents its weights: all
// from this one description.
#ifndef MESHFILL_ENGINE_MODEL_LAYER_SHAPE_H_
#define MESHFILL_ENGINE_MODEL_LAYER_SHAPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/model/model_shape.h"
#include "kernels/dtype.h"
#include "kernels/experts.h"

namespace meshfill {

struct LayerShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;  // width of a dense MLP
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int rotated_dim = 0;  // dimensions of a head that RoPE rotates, from the first on
  int64_t window = 0;   // tokens; 0: none
  MlpKind mlp = MlpKind::kDense;
  ExpertsShape experts;  // only where `mlp` is kExperts
  RouterRule router;     // only where `mlp` is kExperts
  ExpertNames expert_names;
  bool router_correction = false;  // the router has a correction for each expert
  bool expert_bias = false;        // the experts and their router have biases
  SwiGluClamp swiglu_clamp;        // the experts' clamp
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool fused_projections = false;  // q, k and v are one tensor, gate and up of a dense MLP another
  bool post_norms = false;         // what attention and MLP add is normalised, too
  Activation activation = Activation::kSilu;
  LayerRope rope = LayerRope::kMain;
  QkNorm qk_norm = QkNorm::kNone;
  bool sinks = false;         // each query head has one
  Fp8Blocks fp8;              // blocks of all matrices that may be in FP8, but those of `wide`
  LayerParts wide;            // products that are not in FP8
  bool fp4_experts = false;   // the experts' matrices are in MXFP4
  DType dtype = DType::kF32;  // compute dtype

  int64_t q_width() const { return int64_t{q_heads} * head_dim; }
  int64_t kv_width() const { return int64_t{kv_heads} * head_dim; }  // width of K, and of V
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

// A layer of the model of this form, but for what its weights alone tell (biases, norms of Q and K, names).
LayerShape LayerShapeOf(const ModelShape& model, const LayerForm& form = {});
// Layer `layer` of the model.
LayerShape LayerShapeOf(const ModelConfig& config, int layer);

// A vector (a norm's weight, the router's correction, sinks), [out_features], or a linear layer's matrix,
// [out_features, in_features], with its bias, if any.
struct LayerTensor {
  LayerPart part;
  const char* name;
  int64_t out_features;
  int64_t in_features;  // 0: a vector
  bool bias = false;
  int copies = 1;       // one for each expert
  int used_copies = 1;  // by a token
  // All copies are one tensor, transposed: [copies, in_features, out_features]; so are their biases,
  // [copies, out_features].
  bool stacked = false;

  bool is_vector() const { return in_features == 0; }
  bool is_norm() const {
    return is_vector() && part != LayerPart::kRouterCorrection && part != LayerPart::kSinks;
  }
  bool may_be_fp8() const { return !is_vector() && part != LayerPart::kRouter && !stacked; }
  int64_t elements() const { return copies * out_features * (is_vector() ? 1 : in_features); }
  // The tensor's name in the model's folder, less ".bias".
  std::string WeightName(int layer, int copy) const;
  std::string BiasName(int layer, int copy) const;
  std::string ScalesName(int layer, int copy, const char* scales) const;  // the FP8 scales' name
};

// Whether the tensor is in FP8.
bool InFp8(const LayerShape& shape, const LayerTensor& tensor);

// All tensors, in the order in which the layer uses them.
std::vector<LayerTensor> LayerTensors(const LayerShape& shape);

// The stacked matrix of one part: of one expert, where it is theirs.
struct ProductShape {
  int64_t out_features = 0;
  int64_t in_features = 0;
};
ProductShape ProductOf(const LayerShape& shape, LayerPart part);

// Elements of all matrices: of a layer, and of all layers.
int64_t LayerMatrixElements(const LayerShape& shape);
int64_t LayersMatrixElements(const ModelShape& model);
// Bytes of a layer's matrices, where those that are not in FP8 or MXFP4 are held in `packed`.
int64_t LayerMatrixBytes(const LayerShape& shape, DType packed);

// Bytes of matrices in FP8 and MXFP4 once they are widened to `packed`: of the largest layer, and of the
// largest product of a layer, all experts' together.
int64_t MostWidenedBytes(const ModelShape& model, DType packed);
int64_t MostWidenedProductBytes(const ModelShape& model, DType packed);

// How a model's weights are in the memory of the ranks.
enum class WeightMode {
  kResident,  // all of them
  kStreamed,  // two layers of each run, read from the files a layer ahead of their use
  kSharded,   // a part of each layer, and two layers of each run, gathered a layer ahead from all workers
};
const char* WeightModeName(WeightMode mode);  // the configuration's word for the mode

// Bytes of one process's packed weights. Norms are left out: they are nothing beside the matrices.
struct WeightBytes {
  int64_t layers = 0;      // all of them
  int64_t most_layer = 0;  // the largest
  int64_t head = 0;        // the LM head, packed by itself where it is tied to the embedding, too
  int64_t embedding = 0;   // the table
};
WeightBytes WeightBytesOf(const ModelShape& model, DType packed);
// Parts of the weights that a run has in memory at most where they stream: what is used, and what comes next.
inline constexpr int kPartsAhead = 2;

// FLOPs, a multiply-add counted as two: of everything but attention for one token (of the experts, those that
// it uses), of what comes before its attention, and of attention for one visible (query, key) pair, all
// heads.
double LayerTokenFlops(const LayerShape& shape);
constexpr double QkvFlops(const ModelShape& model) {
  return 2.0 * static_cast<double>(model.hidden * model.head_dim * (model.q_heads + 2 * model.kv_heads));
}
constexpr double PairFlops(int64_t q_heads, int64_t head_dim) {
  return 4.0 * static_cast<double>(head_dim * q_heads);
}

// Elements for each token of a slice, all in the compute dtype. A slice's projections, its router's logits,
// and its MLP are never needed at the same time, so they share what is wide.
struct SliceWidths {
  int64_t normed = 0;    // after a norm
  int64_t wide = 0;      // q, k, v; gate, up; the router's logits; what each used expert has to say; what a
                         // sublayer adds before its norm, in f32
  int64_t narrow = 0;    // the gathered attention; silu(gate) · up
  ExpertsShape experts;  // experts for which rows are sorted; count 0: none

  bool operator==(const SliceWidths&) const = default;
};
SliceWidths SliceWidthsOf(const LayerShape& shape);
SliceWidths SliceWidthsOf(const ModelShape& model);  // enough for each of its layers
// What `tokens` tokens of them take, with where the experts' rows lie (kernels/experts.h).
int64_t SliceBytes(const SliceWidths& widths, int64_t tokens, DType dtype);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_LAYER_SHAPE_H_
