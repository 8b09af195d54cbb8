// One launch of an attention kernel, as it is copied to the device.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_PARAMS_H_
#define MESHFILL_KERNELS_CUDA_ATTENTION_PARAMS_H_

#include <algorithm>
#include <cstdint>
#include <numbers>

#include "kernels/cuda/attention_tiles.h"
#include "kernels/stream.h"

namespace meshfill {

struct AttentionParams {
  BlockShape shape;
  const void* q;     // [q_heads, q_tokens, head_dim], bf16 or f16
  const void* k;     // [q_heads / group, k_tokens, head_dim]
  const void* v;     // [q_heads / group, k_tokens, head_dim]
  float* o;          // [q_heads, q_tokens, head_dim]
  float* lse;        // [q_heads, q_tokens]
  float scale_log2;  // scale · log₂ e, positive: exp(scale · s) = 2^(scale_log2 · s)
  bool carry_in;
};

// The arguments are in range (attention.h).
inline AttentionParams MakeAttentionParams(const AttentionBlockArgs& args, int64_t l2_bytes) {
  constexpr int64_t kNoWindow = int64_t{1} << 31;  // hides nothing: positions are smaller
  const auto group = static_cast<uint32_t>(args.q_heads / args.kv_heads);
  const uint64_t kv_bytes_per_head = uint64_t{4} * args.k_tokens * args.head_dim;
  const BlockShape shape{.q_tokens = static_cast<uint32_t>(args.q_tokens),
                         .k_tokens = static_cast<uint32_t>(args.k_tokens),
                         .q_heads = static_cast<uint32_t>(args.q_heads),
                         .group = Divisor(group),
                         .head_dim = static_cast<uint32_t>(args.head_dim),
                         .window = static_cast<uint32_t>(std::min(args.band.window, kNoWindow)),
                         .first_q = static_cast<uint32_t>(args.band.first_q),
                         .q_slots = DeviceSlots::From(args.band.q),
                         .k_slots = DeviceSlots::From(args.band.k),
                         .section_heads = SectionHeads(args.q_heads, group, kv_bytes_per_head, l2_bytes)};
  return {.shape = shape,
          .q = args.q,
          .k = args.k,
          .v = args.v,
          .o = args.o,
          .lse = args.lse,
          .scale_log2 = args.scale * std::numbers::log2e_v<float>,
          .carry_in = args.carry_in};
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_PARAMS_H_
