// Rotary position embedding tables (RoFormer §3.4.2; scalings as in Hugging Face's modeling_rope_utils).
#ifndef MESHFILL_ENGINE_MODEL_ROPE_H_
#define MESHFILL_ENGINE_MODEL_ROPE_H_

#include <cstdint>
#include <vector>

#include "engine/model/rope_config.h"
#include "kernels/band.h"

namespace meshfill {

// [rotated_dim / 2]: radians per position, in f32 as the published models compute them, in a prompt of so
// many tokens, by which longrope chooses its factors: cached ones, and those that later runs compute, count.
std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int rotated_dim, int64_t prompt_tokens);

// Writes cos and sin of a chunk's slots, each [tokens, rotated_dim / 2], f32, times the scaling's attention
// factor. The frequencies are those of the prompt that the chunk is of. Positions count from `first`, where
// the queries follow a cached prefix. The angle is the f32 product of position and frequency, as the
// published models round it. Long tables are filled by up to `threads` threads: one takes about 2 µs a token.
void FillRopeTables(const RopeConfig& rope, int rotated_dim, int64_t prompt_tokens, int64_t first,
                    const SlotPositions& positions, int64_t tokens, float* cos, float* sin, int threads = 1);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_ROPE_H_
