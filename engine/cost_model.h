// Predicts what a schedule costs: seconds, bytes, memory (Mesh-Attention §3.5, Figure 6; DESIGN §4).
//
// Ranks are taken to run in lockstep and chunks to be as long as the longest. A step then takes the longer of
// its communication and its blocks, and what the communication takes beyond its blocks is comm wait.
#ifndef MESHFILL_ENGINE_COST_MODEL_H_
#define MESHFILL_ENGINE_COST_MODEL_H_

#include <cstdint>

#include "engine/layout.h"
#include "engine/mesh.h"
#include "engine/model_shape.h"
#include "engine/plan.h"
#include "engine/schedule.h"

namespace meshfill {

// In all of these, `heads` head groups were found possible (ModelShape::CanSplitHeads) and divide the
// layout's ranks; the tile is that of each of the meshes of ranks/heads.

// What one rank of the pool does per second, measured or configured. All positive, the latency may be 0.
struct PoolSpeed {
  double gemm_flops_per_second = 50e9;       // projections, per rank when all ranks run
  double attention_flops_per_second = 50e9;  // attention blocks, per rank when all ranks run
  double merge_bytes_per_second = 5e9;       // partial outputs merged, chunks reordered, per rank likewise
  double link_bytes_per_second = 10e9;       // one chunk from a rank to its neighbour
  double link_latency_seconds = 5e-6;        // start of one communication
};

// Bytes that `rank` sends in one layer: DESIGN §4 and head_exchange.h, exact for ragged chunks and replicated
// KV heads too.
CommBytes LayerCommBytes(const ModelShape& model, const TokenLayout& layout, int heads, Tile tile,
                         DType partial_dtype, int rank);

// The least numbers of blocks that hide the transfer of one Q, KV and O chunk: what Algorithm 2 asks for. For
// the average layer, where some have a sliding window; at most a·b, beyond which they mean the same.
OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                            int heads, Tile tile, DType partial_dtype);

// The most blocks that are over when such a transfer is, at least 1: a step of them makes no transfer longer.
OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                             int heads, Tile tile, DType partial_dtype);

// Of the whole prefill under this schedule. Nothing hides an all-to-all.
Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout, int heads,
                   const Schedule& schedule, DType partial_dtype);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COST_MODEL_H_
