// The numbers of a transformer that planning, memory and FLOP counts need; nothing of its weights or files.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_SHAPE_H_
#define MESHFILL_ENGINE_MODEL_MODEL_SHAPE_H_

#include <cstdint>

#include "kernels/dtype.h"

namespace meshfill {

struct ModelShape {
  int layers = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int64_t vocab = 0;
  int64_t context_tokens = 0;  // longest prompt that the model is for
  int64_t sliding_window = 0;  // tokens, 0: none; of the layers that have one
  int windowed_layers = 0;     // how many layers have the window
  DType dtype = DType::kF32;   // compute dtype

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

  // Head parallelism (DESIGN §4): member k of a head group of h ranks attends with query heads
  // [k·q_heads/h, (k+1)·q_heads/h) and with the KV heads from ⌊k·kv_heads/h⌋ on that those see: kv_heads/h of
  // them, or one, where fewer KV heads than members are replicated. Possible where h divides q_heads, and
  // kv_heads and h one the other.
  bool CanSplitHeads(int h) const {
    return h >= 1 && q_heads % h == 0 && (kv_heads % h == 0 || h % kv_heads == 0);
  }
  ModelShape HeadSlice(int h) const;  // the same model with one member's heads
  bool operator==(const ModelShape&) const = default;
};

// FLOPs of one forward pass over a prompt, a multiply-add counted as two. Attention counts the visible pairs
// only (DESIGN §1, MFU): 4 · head_dim · q_heads per pair and layer. The LM head counts one row.
double AttentionFlops(const ModelShape& model, int64_t tokens);
double ModelFlops(const ModelShape& model, int64_t tokens);
double ProjectionFlopsPerToken(const ModelShape& model);  // q, k, v, o, gate, up and down of all layers
double LmHeadFlops(const ModelShape& model);              // of its one row
// Visible (query, key) pairs of a causal prompt with a sliding window (0: none).
double VisiblePairs(int64_t tokens, int64_t window);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_SHAPE_H_
