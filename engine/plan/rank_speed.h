// What one rank of a pool does per second: what the planner predicts from.
#ifndef MESHFILL_ENGINE_PLAN_RANK_SPEED_H_
#define MESHFILL_ENGINE_PLAN_RANK_SPEED_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "engine/mesh/topology.h"
#include "kernels/device.h"

namespace meshfill {

// Measured or configured.
struct PoolSpeed {
  double gemm_flops_per_second = 50e9;       // projections and what is between them, when all ranks run
  double attention_flops_per_second = 50e9;  // attention blocks, per rank when all ranks run
  double merge_bytes_per_second = 5e9;       // merges and reorders of chunks, per rank when all run
  double link_bytes_per_second = 10e9;  // one chunk from a rank to any other: of a pool without a topology
  double link_latency_seconds = 5e-6;   // start of one communication there

  // What does not shrink with the work, per rank when all ranks run: small slices and blocks are less
  // efficient.
  double slice_seconds = 0;      // each slice of each layer: weights read, operations begun
  double block_row_seconds = 0;  // each row (query and head) of each block: its state read and written
  double token_seconds = 0;      // each token once: embedding, RoPE
  double start_seconds = 0;      // each prefill once: threads begun and ended
  double lm_head_bytes_per_second = std::numeric_limits<double>::infinity();  // weights read for one row

  int64_t slice_tokens = Grain().slice_tokens;  // tokens of the slices in which the backend computes a chunk

  // How many times as fast a rank runs while the others wait: above 1 where ranks share cores, and then the
  // pool takes no longer than its whole work or its busiest rank alone needs.
  double lone_rank_speedup = 1;

  Link link() const {
    return {.latency_seconds = link_latency_seconds, .bytes_per_second = link_bytes_per_second};
  }
  bool operator==(const PoolSpeed&) const = default;
};

// The numbers of a PoolSpeed beside slice_tokens, by their names.
struct SpeedField {
  enum class Kind {
    kRate,     // above 0
    kSeconds,  // finite, 0 or more
    kFactor,   // finite, 1 or more
  };
  const char* name;
  double PoolSpeed::*value;
  Kind kind;
};
inline constexpr SpeedField kSpeedFields[] = {
    {"gemm_flops_per_second", &PoolSpeed::gemm_flops_per_second, SpeedField::Kind::kRate},
    {"attention_flops_per_second", &PoolSpeed::attention_flops_per_second, SpeedField::Kind::kRate},
    {"merge_bytes_per_second", &PoolSpeed::merge_bytes_per_second, SpeedField::Kind::kRate},
    {"link_bytes_per_second", &PoolSpeed::link_bytes_per_second, SpeedField::Kind::kRate},
    {"link_latency_seconds", &PoolSpeed::link_latency_seconds, SpeedField::Kind::kSeconds},
    {"slice_seconds", &PoolSpeed::slice_seconds, SpeedField::Kind::kSeconds},
    {"block_row_seconds", &PoolSpeed::block_row_seconds, SpeedField::Kind::kSeconds},
    {"token_seconds", &PoolSpeed::token_seconds, SpeedField::Kind::kSeconds},
    {"start_seconds", &PoolSpeed::start_seconds, SpeedField::Kind::kSeconds},
    {"lm_head_bytes_per_second", &PoolSpeed::lm_head_bytes_per_second, SpeedField::Kind::kRate},
    {"lone_rank_speedup", &PoolSpeed::lone_rank_speedup, SpeedField::Kind::kFactor},
};

// INVALID_ARGUMENT names the field that no pool has so, its value, and what it may be: its kind's range, and
// 1 to 2^20 slice_tokens.
absl::Status CheckPoolSpeed(const PoolSpeed& speed);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_RANK_SPEED_H_
