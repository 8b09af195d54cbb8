// One layer of a transformer around its attention, over a slice of a chunk's tokens:
//
//     q, k, v = heads(rope(norm(x) Wqkv))              Project
//     x += attention(q, k, v) Wo                       AddAttention, of what the mesh has attended
//     x += (act(norm(x) Wgate) · norm(x) Wup) Wdown    AddMlp; act is SiLU or GELU
//
// Sinks (ApplySinks of kernels/stream.h) are applied with the mesh's attention, by whoever ends a row.
//
// With experts, the MLP is a sum of such MLPs: of the shared expert, and of those that a router chooses for
// the token, each times its weight. With norms behind the sublayers, what each adds to x is normalised first.
//
// The runner computes a prefill with it, and the probe measures a pool with it (layer_shape.h has its sizes).
#ifndef MESHFILL_ENGINE_MODEL_LAYER_H_
#define MESHFILL_ENGINE_MODEL_LAYER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/layer_shape.h"
#include "kernels/stream.h"

namespace meshfill {

// A short vector as the file has it, and where operations read it.
class PlacedVector {
 public:
  PlacedVector() = default;
  static absl::StatusOr<PlacedVector> Make(Device& device, std::vector<float> values);

  const std::vector<float>& values() const { return values_; }
  const float* data() const { return placed_ == nullptr ? nullptr : placed_->data<float>(); }  // null: empty

 private:
  std::vector<float> values_;
  BufferRef placed_;
};

struct ExpertWeights {
  std::unique_ptr<PackedWeight> router;                // [experts, hidden]
  PlacedVector correction;                             // [experts], or empty
  std::unique_ptr<PackedWeight> shared_gate_up;        // [2·shared_width, hidden], or null
  std::unique_ptr<PackedWeight> shared_down;           // [hidden, shared_width], or null
  std::vector<std::unique_ptr<PackedWeight>> gate_up;  // [experts] of [2·width, hidden]
  std::vector<std::unique_ptr<PackedWeight>> down;     // [experts] of [hidden, width]
};

struct LayerWeights {
  PlacedVector attention_norm;            // [hidden]
  PlacedVector mlp_norm;                  // [hidden]
  PlacedVector attention_post_norm;       // [hidden], or empty
  PlacedVector mlp_post_norm;             // [hidden], or empty
  PlacedVector q_norm, k_norm;            // [head_dim] or [heads·head_dim], or empty
  PlacedVector sinks;                     // [q_heads], or empty
  std::unique_ptr<PackedWeight> qkv;      // [(q_heads + 2·kv_heads)·head_dim, hidden]: q, k, v stacked
  std::unique_ptr<PackedWeight> o;        // [hidden, q_heads·head_dim]
  std::unique_ptr<PackedWeight> gate_up;  // [2·intermediate, hidden]: gate, up stacked; null: experts
  std::unique_ptr<PackedWeight> down;     // [hidden, intermediate]; null: experts
  ExpertWeights experts;                  // where the layer has them
};

// What a slice is computed in: [slice_tokens, width] each, compute dtype, SliceWidthsOf's widths. Every layer
// uses it again.
struct LayerBuffers {
  static absl::StatusOr<LayerBuffers> Make(Stream& stream, const SliceWidths& widths, DType dtype,
                                           int64_t slice_tokens);
  BufferRef normed, wide, narrow;
  BufferRef expert_rows;  // kernels/experts.h; of no bytes without experts
};

// Tokens [begin, begin + tokens) of a chunk, or of several, one after the other.
struct ChunkSlice {
  int64_t begin;
  int64_t tokens;
};

// A view: shape, weights, buffers and stream outlive it. Errors are the device's.
class Layer {
 public:
  Layer(const LayerShape& shape, const LayerWeights& weights, float norm_eps, const LayerBuffers& buffers,
        Stream& stream)
      : shape_(shape), weights_(weights), norm_eps_(norm_eps), buffers_(buffers), stream_(stream) {}

  // A chunk's heads, where Project writes the slice's.
  struct Heads {
    int64_t tokens;         // of the chunk
    const float* rope_cos;  // [tokens, rotated_dim/2]
    const float* rope_sin;
    void* q;  // [q_heads, tokens, head_dim], compute dtype
    void* k;  // [kv_heads, tokens, head_dim]
    void* v;
  };
  // x: [tokens, hidden], the slice of the residual stream, f32. `chunks`: all of them.
  absl::Status Project(const float* x, const ChunkSlice& slice, std::span<const Heads> chunks) const;

  // A chunk's attention: parts of as many query heads each, in order: [heads, tokens, head_dim].
  struct Attended {
    int64_t tokens;  // of the chunk
    std::span<const void* const> parts;
    DType dtype;
  };
  absl::Status AddAttention(std::span<const Attended> chunks, const ChunkSlice& slice, float* x) const;

  // `tokens_per_expert`: [experts] in the device's memory, or null: the layer's experts count theirs there.
  absl::Status AddMlp(int64_t tokens, float* x, int32_t* tokens_per_expert = nullptr) const;

 private:
  template <class Body>  // body(begin, tokens)
  absl::Status ForEachGrain(int64_t tokens, const Body& body) const;
  absl::Status ProjectGrain(const float* x, const ChunkSlice& slice, std::span<const Heads> chunks) const;
  absl::Status Norm(const float* x, const PlacedVector& weight, int64_t tokens) const;          // into normed
  absl::Status Multiply(const PackedWeight& weight, const void* normed, int64_t tokens) const;  // into wide
  absl::Status Gather(std::span<const Attended> chunks, const ChunkSlice& slice) const;         // into narrow
  GatedActivation DenseActivation() const;
  GatedActivation ExpertActivation() const;
  // Adds to x the product of narrow and `weight`, normalised first where `post_norm` is not empty.
  absl::Status AddProduct(const PackedWeight& weight, const PlacedVector& post_norm, int64_t tokens,
                          float* x) const;
  absl::Status AddDense(const PackedWeight& gate_up, const PackedWeight& down, int64_t width, int64_t tokens,
                        float* x) const;                                                // reads normed
  absl::Status AddExperts(int64_t tokens, float* x, int32_t* tokens_per_expert) const;  // reads normed

  const LayerShape& shape_;
  const LayerWeights& weights_;
  const float norm_eps_;
  const LayerBuffers& buffers_;
  Stream& stream_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_LAYER_H_
