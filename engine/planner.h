// Chooses the plan (Mesh-Attention Figure 6): every factorisation is scheduled, its time estimated, the best taken.
#ifndef MESHFILL_ENGINE_PLANNER_H_
#define MESHFILL_ENGINE_PLANNER_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/model_shape.h"
#include "engine/plan.h"

namespace meshfill {

// What one rank of the pool does per second, measured or configured.
struct PoolSpeed {
  double gemm_flops_per_second = 50e9;       // projections, per rank when all ranks run
  double attention_flops_per_second = 50e9;  // attention blocks, per rank when all ranks run
  double link_bytes_per_second = 10e9;       // one chunk from a rank to its neighbour
  double link_latency_seconds = 5e-6;        // start of one communication
};

struct PlanRequest {
  int64_t tokens = 0;
  int ranks = 1;
  LayoutKind layout = LayoutKind::kStriped;
  int64_t stripe = 64;
  std::optional<Tile> tile;               // fixed by the caller
  std::optional<int> heads;               // fixed by the caller
  DType partial_dtype = DType::kF32;
  int64_t memory_budget_bytes = 0;        // activations of all ranks; 0: no limit
};

// INVALID_ARGUMENT: no tokens, a tile that does not multiply to the ranks, bad options. FAILED_PRECONDITION: no shape
// fits the memory budget (the message has both numbers).
absl::StatusOr<PlanChoice> MakePlan(const ModelShape& model, const PoolSpeed& speed, const PlanRequest& request);

// Bytes that `rank` sends in one layer under this tile: DESIGN §4, exact for ragged chunks too.
CommBytes LayerCommBytes(const ModelShape& model, const TokenLayout& layout, Tile tile, DType partial_dtype, int rank);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLANNER_H_
