// The attention whose distribution is simulated: one layer, forward or backward, and what its chunks weigh.
#ifndef MESHFILL_ENGINE_SIM_ATTENTION_JOB_H_
#define MESHFILL_ENGINE_SIM_ATTENTION_JOB_H_

#include <cstdint>

#include "absl/status/status.h"

namespace meshfill::sim {

enum class Pass { kForward, kBackward };
const char* PassName(Pass pass);  // "forward", "backward"

// Bytes of one number as it travels between ranks.
struct WireBytes {
  int element = 2;   // Q, K, V, dO, finished O
  int partial = 2;   // partial outputs
  int gradient = 4;  // dQ, dK, dV: partial sums
  int lse = 4;       // the log-sum-exp of one query and head
};

struct AttentionJob {
  int64_t tokens = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  bool causal = true;  // balanced by the striped layout: every block computes half of its pairs
  WireBytes wire;

  // FLOPs of one pass over all unmasked pairs: 2 matrix products forward, 5 backward (FlashAttention-2
  // recomputes).
  double Flops(Pass pass) const;
};

// INVALID_ARGUMENT naming what is not positive, 2^31 tokens or more, KV heads that do not divide the query
// heads, or chunks whose bytes would not fit 63 bits together.
absl::Status CheckJob(const AttentionJob& job);

// Bytes of the chunks of `tokens` tokens with `q_heads` and `kv_heads` heads.
struct ChunkBytes {
  int64_t q = 0;
  int64_t kv = 0;          // K and V
  int64_t o = 0;           // a partial output with its LSE, on the wire
  int64_t o_finished = 0;  // an output in the element's type
  int64_t o_state = 0;     // a partial output with its LSE, f32, as a rank accumulates it
  int64_t odoq = 0;        // O, dO, Q and LSE
  int64_t dq = 0;
  int64_t dkv = 0;  // dK and dV
};
ChunkBytes ChunkBytesOf(const AttentionJob& job, int64_t tokens, int q_heads, int kv_heads);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_ATTENTION_JOB_H_
