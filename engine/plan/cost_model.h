// Predicts what a schedule costs (Mesh-Attention §3.5, Figure 6; DESIGN §4): seconds here, bytes sent in
// engine/plan/comm_bytes.h, memory in engine/plan/peak_bytes.h.
//
// Ranks are taken to run in lockstep and chunks to be as long as the longest. A step then takes the longer of
// its communication and its blocks, and what the communication takes beyond its blocks is comm wait.
#ifndef MESHFILL_ENGINE_PLAN_COST_MODEL_H_
#define MESHFILL_ENGINE_PLAN_COST_MODEL_H_

#include <cstdint>
#include <limits>
#include <optional>

#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/topology.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_shape.h"
#include "engine/schedule/schedule.h"
#include "kernels/device.h"

namespace meshfill {

// What one rank of the pool does per second, measured or configured. Rates are positive; of what is in
// seconds, all may be 0.
struct PoolSpeed {
  double gemm_flops_per_second = 50e9;       // projections and what is between them, when all ranks run
  double attention_flops_per_second = 50e9;  // attention blocks, per rank when all ranks run
  double merge_bytes_per_second = 5e9;       // partial outputs merged, chunks reordered, per rank likewise
  double link_bytes_per_second = 10e9;  // one chunk from a rank to any other: of a pool without a topology
  double link_latency_seconds = 5e-6;   // start of one communication there

  // What does not shrink with the work, per rank when all ranks run: small slices and blocks are less
  // efficient.
  double slice_seconds = 0;      // of each slice of each layer: weights read, operations begun
  double block_row_seconds = 0;  // of each row (query and head) of each block: its state read and written
  double token_seconds = 0;      // of each token once: embedding, RoPE
  double start_seconds = 0;      // of each prefill once: threads begun and ended
  double lm_head_bytes_per_second = std::numeric_limits<double>::infinity();  // weights read for one row

  int64_t slice_tokens = Grain().slice_tokens;  // of its backend: in what slices a plan cuts a chunk

  // How many times as fast a rank runs while the others wait: above 1 where ranks share cores, and then the
  // pool takes no longer than its whole work or its busiest rank alone needs.
  double lone_rank_speedup = 1;

  Link link() const {
    return {.latency_seconds = link_latency_seconds, .bytes_per_second = link_bytes_per_second};
  }
  bool operator==(const PoolSpeed&) const = default;
};

// The least numbers of blocks that hide the transfer of one Q, KV and O chunk: what Algorithm 2 asks for. For
// the average layer, where some have a sliding window; at most a·b, beyond which they mean the same.
OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

// The most blocks that are over when such a transfer is, at least 1: a step of them makes no transfer longer.
OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

// What the parts of one layer's attention take, on every rank. Nothing hides an all-to-all.
struct AttentionSeconds {
  double block = 0;
  PerTraffic<double> transfer;  // one Q, KV or O chunk
  double merge = 0;             // of one partial output that arrived
  double to_heads = 0;          // the all-to-alls before the mesh, and after; 0 with one head group
  double to_tokens = 0;
  double reorder_to_heads = 0;  // passes of memory that put what they bring in order
  double reorder_to_tokens = 0;

  double Transfer(std::optional<Traffic> comm) const;
  double Compute(Tile tile) const;  // of the whole layer
  double Wait(const Schedule& schedule) const;
  double LeastWait(Tile tile) const;  // under any schedule
};
AttentionSeconds AttentionSecondsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                                    int64_t window);

// Predicts the whole prefill. `schedule` must be for `shape.tile`.
Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule);

// The same without bytes sent, which the schedule does not change.
Prediction PredictTimeAndMemory(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                                const Schedule& schedule);

// No schedule of the shape is predicted to take less: its transfers go one by one, its blocks beside them.
double LeastSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_COST_MODEL_H_
