// The operations of a layer on made-up data, as one rank runs them: what pool_speed.h times.
//
// A model wider than the device's grain is probed with fewer heads and narrower matrices, so that a probe of
// any model takes some milliseconds, and some tens of megabytes on the CPU, about a gigabyte on a GPU.
#ifndef MESHFILL_ENGINE_SPEED_LAYER_PROBE_H_
#define MESHFILL_ENGINE_SPEED_LAYER_PROBE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/layer.h"
#include "engine/model/model_shape.h"
#include "kernels/stream.h"

namespace meshfill {

inline constexpr int kProbeSlices = 4;

// Tokens of the slices in which a device computes such a model: its grain's, or a small multiple, in which an
// expert has the grain's expert_rows on average. Each slice reads all experts.
int64_t SliceTokensOf(const ModelShape& model, const Grain& grain);

// One layer's weights and the LM head's; shared by the probes of a pool, as the ranks share a model.
struct ProbeWeights {
  ModelShape shape;    // the probed model: one layer
  double layer_scale;  // weights of a layer of the real model over those of this one
  LayerShape layer_shape;
  LayerWeights layer;
  std::unique_ptr<PackedWeight> lm_head;
  BufferRef embedding;  // [shape.vocab, hidden], compute dtype
};

absl::StatusOr<std::shared_ptr<const ProbeWeights>> MakeProbeWeights(const ModelShape& model, Stream& stream);

// One rank's buffers. Called from one thread at a time; `stream` outlives it. Operations fail where the
// device does.
class LayerProbe {
 public:
  static absl::StatusOr<std::unique_ptr<LayerProbe>> Make(std::shared_ptr<const ProbeWeights> weights,
                                                          Stream& stream);

  int64_t slice_tokens() const { return slice_tokens_; }  // the most of TokenWork and Begin
  int64_t block_tokens() const { return block_tokens_; }  // the most of Block and Merge
  double layer_scale() const { return weights_->layer_scale; }
  double settle_seconds() const { return stream_.device().grain().settle_seconds; }

  // All of a layer but attention, over a slice of tokens: norms, projections, RoPE, the gathered output, MLP.
  // Each call takes the next of kProbeSlices slices: a rank's activations stream through the caches, its
  // weights stay.
  absl::Status TokenWork(int64_t tokens);
  double TokenFlops(int64_t tokens) const;

  // A causal block of attention, of some of the heads, merged into what the rows hold.
  absl::Status Block(int64_t tokens);
  double BlockFlops(int64_t tokens) const;
  double BlockRows(int64_t tokens) const;

  // A partial output in f32 that arrived, merged.
  absl::Status Merge(int64_t tokens);
  double MergeBytes(int64_t tokens) const;

  // What a prefill begins with: embedding and RoPE tables.
  absl::Status Begin(int64_t tokens);

  // The LM head on one row, whatever `tokens` is.
  absl::Status LmHead(int64_t tokens);
  double LmHeadBytes() const;

  // Waits until all of the above has run.
  absl::Status Finish() { return stream_.Finish(); }

 private:
  LayerProbe(std::shared_ptr<const ProbeWeights> weights, Stream& stream);
  absl::Status Prepare();
  absl::Status PlaceRopeTables(int64_t tokens);  // `tokens`: at least as many as a TokenWork that follows has

  const std::shared_ptr<const ProbeWeights> weights_;
  const ModelShape& shape_;
  Stream& stream_;
  const int kv_heads_;  // KV heads of a probed block
  const int q_heads_;
  const int64_t slice_tokens_;
  const int64_t block_tokens_;

  int slice_ = 0;              // slice of the next TokenWork
  std::vector<float> rope_;    // cos, then sin, each [slice_tokens, rotated_dim/2]
  std::vector<uint32_t> ids_;  // [slice_tokens]
  BufferRef residual_;         // [kProbeSlices, slice_tokens, hidden], f32
  LayerBuffers buffers_;
  BufferRef cos_, sin_;           // rope_ as operations read it
  BufferRef chunk_q_, chunk_kv_;  // [kProbeSlices]: Q, and K and V, of each slice
  BufferRef attended_;            // [kProbeSlices, q_heads, slice_tokens, head_dim], f32
  BufferRef block_q_, block_kv_;
  BufferRef state_, other_state_;  // [q_heads_, block_tokens, head_dim], f32, then the LSE
  BufferRef logits_;               // [shape.vocab], f32
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SPEED_LAYER_PROBE_H_
