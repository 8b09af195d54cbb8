// The numbers of a transformer that planning, memory and FLOP counts need; nothing of its weights or files.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_SHAPE_H_
#define MESHFILL_ENGINE_MODEL_MODEL_SHAPE_H_

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/dtype.h"

namespace meshfill {

enum class MlpKind {
  kDense,    // down(activation(gate) · up)
  kExperts,  // a router sends each token through some of many of these
};

// What the gate of an MLP goes through.
enum class Activation {
  kSilu,
  kGelu,  // GELU in its tanh form
};

// Which of a model's rotary embeddings a layer has.
enum class LayerRope {
  kMain,
  kLocal,  // a separate one for layers with a window
};

// What a tensor of the layer is for. The linear layers of one part are stacked into one product.
enum class LayerPart {
  kAttentionNorm,
  kQkv,
  kQNorm,
  kKNorm,
  kSinks,
  kO,
  kAttentionPostNorm,
  kMlpNorm,
  kGateUp,
  kDown,
  kMlpPostNorm,
  kRouter,
  kRouterCorrection,
  kSharedGateUp,
  kSharedDown,
  kExpertGateUp,
  kExpertDown,
};

// A set of parts.
class LayerParts {
 public:
  void Add(LayerPart part) { bits_ |= Bit(part); }
  bool Has(LayerPart part) const { return (bits_ & Bit(part)) != 0; }
  bool empty() const { return bits_ == 0; }
  uint32_t bits() const { return bits_; }  // a number for each set
  auto operator<=>(const LayerParts&) const = default;

 private:
  static constexpr uint32_t Bit(LayerPart part) { return uint32_t{1} << static_cast<int>(part); }

  uint32_t bits_ = 0;
};

// What the layers of one model may differ in.
struct LayerForm {
  int64_t window = 0;  // tokens; 0: none
  MlpKind mlp = MlpKind::kDense;
  LayerRope rope = LayerRope::kMain;
  LayerParts wide = {};  // products that are not in FP8, where the model's others are
  auto operator<=>(const LayerForm&) const = default;
};

// The layers of one form.
struct LayerKind {
  LayerForm form;
  int layers;
  bool operator==(const LayerKind&) const = default;
};

// The forms of `layers`, sorted, and how many layers have each.
std::vector<LayerKind> LayerKindsOf(std::span<const LayerForm> layers);

// The MLP of every layer that has experts.
struct ExpertsShape {
  int count = 0;             // 0: no layer has experts
  int used = 0;              // experts that each token goes through
  int64_t width = 0;         // intermediate features of one expert
  int64_t shared_width = 0;  // width of the expert that every token goes through; 0: there is none
  bool operator==(const ExpertsShape&) const = default;
};

// Elements of a matrix in FP8 that share a scale.
struct Fp8Blocks {
  static constexpr int64_t kAll = INT64_MAX;  // one block over all rows or all columns

  int64_t rows = 0;  // 0: weights are not in FP8
  int64_t columns = 0;

  int64_t ScaleRows(int64_t matrix_rows) const { return (matrix_rows - 1) / rows + 1; }
  int64_t ScaleColumns(int64_t matrix_columns) const { return (matrix_columns - 1) / columns + 1; }
  bool operator==(const Fp8Blocks&) const = default;
};

struct ModelShape {
  int layers = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;  // width of a dense MLP
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int rope_dim = 0;         // how many dimensions of a head are rotated, from the first on; 0: all
  double score_scalar = 0;  // scores are q·k / √score_scalar; 0: head_dim
  Activation activation = Activation::kSilu;
  bool post_norms = false;  // what a sublayer adds is normalised, too
  int64_t vocab = 0;
  int64_t context_tokens = 0;   // longest prompt that the model is for
  int64_t long_rope_after = 0;  // tokens of the longest prompt whose K and V are of longrope's short factors;
                                // 0: all prompts are alike
  ExpertsShape experts;
  std::vector<LayerKind> kinds;  // LayerKindsOf its layers; empty: all are dense and see all keys
  Fp8Blocks fp8;                 // blocks of the layers' matrices, but their routers' and LayerForm::wide
  bool fp4_experts = false;      // the experts' matrices are in MXFP4
  DType dtype = DType::kF32;     // compute dtype

  int rotated_dim() const { return rope_dim == 0 ? head_dim : rope_dim; }
  bool HasLongRope(int64_t prompt_tokens) const {
    return long_rope_after > 0 && prompt_tokens > long_rope_after;
  }
  float score_scale() const;  // factor on q·k before the softmax
  int rope_count() const;     // number of different rotary embeddings
  // visit(form, layers) for each form.
  template <typename Visit>
  void ForEachKind(const Visit& visit) const {
    if (kinds.empty()) return visit(LayerForm(), layers);
    for (const LayerKind& kind : kinds) visit(kind.form, kind.layers);
  }
  // visit(window, layers) for each window, 0 (none) first.
  template <typename Visit>
  void ForEachWindow(const Visit& visit) const {
    if (kinds.empty()) return visit(int64_t{0}, layers);
    for (size_t i = 0; i < kinds.size();) {  // sorted by window
      const int64_t window = kinds[i].form.window;
      int with_window = 0;
      for (; i < kinds.size() && kinds[i].form.window == window; ++i) with_window += kinds[i].layers;
      visit(window, with_window);
    }
  }

  int64_t q_elements(int64_t tokens) const { return tokens * q_heads * head_dim; }
  int64_t kv_elements(int64_t tokens) const { return 2 * tokens * kv_heads * head_dim; }

  // Bytes of one layer's chunks of `tokens` tokens, as they move between ranks. A partial output is O in the
  // wire's dtype with its LSE, always f32: 4 bytes for each query and head.
  int64_t q_bytes(int64_t tokens) const {
    return q_elements(tokens) * static_cast<int64_t>(DTypeBytes(dtype));
  }
  int64_t kv_bytes(int64_t tokens) const {
    return kv_elements(tokens) * static_cast<int64_t>(DTypeBytes(dtype));
  }
  int64_t partial_bytes(int64_t tokens, DType wire) const {
    return q_elements(tokens) * static_cast<int64_t>(DTypeBytes(wire)) + tokens * q_heads * 4;
  }

  // Head parallelism (docs/concepts.md, Head groups): member k of a head group of h ranks attends with query
  // heads [k·q_heads/h, (k+1)·q_heads/h) and with the KV heads from ⌊k·kv_heads/h⌋ on that those see:
  // kv_heads/h of them, or one, where fewer KV heads than members are replicated. Possible where h divides
  // q_heads, and kv_heads and h one the other.
  bool CanSplitHeads(int h) const {
    return h >= 1 && q_heads % h == 0 && (kv_heads % h == 0 || h % kv_heads == 0);
  }
  ModelShape HeadSlice(int h) const;  // the same model with one member's heads
  bool operator==(const ModelShape&) const = default;
};

// FLOPs of one forward pass over a prompt, a multiply-add counted as two. Attention counts the visible pairs
// only (docs/concepts.md, MFU): 4 · head_dim · q_heads per pair and layer. The LM head counts one row.
double AttentionFlops(const ModelShape& model, int64_t tokens);
double ModelFlops(const ModelShape& model, int64_t tokens);
// What a model computes in where nobody says: f32 where the weights of all its matrices are, else bf16.
constexpr DType AutoDType(bool f32_weights) { return f32_weights ? DType::kF32 : DType::kBf16; }

// FLOPs of one token in the matrix products of all layers. Of the experts, those that it uses count.
double ProjectionFlopsPerToken(const ModelShape& model);
double LmHeadFlops(const ModelShape& model);  // FLOPs of one row
inline int64_t LmHeadBytes(const ModelShape& model, DType dtype) {
  return ElementsBytes(dtype, model.vocab * model.hidden);
}
// Visible (query, key) pairs of a causal prompt with a sliding window (0: none).
double VisiblePairs(int64_t tokens, int64_t window);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_SHAPE_H_
