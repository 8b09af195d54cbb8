// What is asked of the planner (planner.h).
#ifndef MESHFILL_ENGINE_PLAN_PLAN_REQUEST_H_
#define MESHFILL_ENGINE_PLAN_PLAN_REQUEST_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/topology.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"

namespace meshfill {

struct PlanRequest {
  int64_t tokens = 0;         // the prompt's
  int64_t cached_tokens = 0;  // before it, whose keys and values are there already
  int ranks = 1;
  std::optional<LayoutKind> layout = LayoutKind::kStriped;  // nullopt: as predicted to be fastest
  int64_t stripe = 64;  // tokens, where the layout is striped; where it is left open, at least
  std::optional<Tile> tile = std::nullopt;  // fixed by the caller
  std::optional<int> heads = std::nullopt;  // fixed by the caller; a tile without it means one head group
  std::optional<DType> partial_dtype = DType::kF32;  // f32 or bf16; nullopt: as predicted to be fastest
  ScheduleChoice schedule = ScheduleChoice::kAuto;
  // Bytes of all ranks together that one run may take: activations, and weights that stream past. 0: no limit
  int64_t memory_budget_bytes = 0;
  PlanWeights weights = {};
  bool one_memory = true;   // ranks share it (PlanShape)
  bool keeps_kv = false;    // K and V of the prompt are kept
  bool kv_on_host = false;  // what is kept is in other memory (PlanShape)
  Topology topology = {};   // no seats: every link is that of the pool's speed
  // Messages go on beside compute: head groups may exchange in slices. Where weights are not resident they
  // never do, as two layers' are needed at once.
  bool hides_exchanges = false;
  bool many_rings = false;  // a message along each ring of a mesh may be under way at once
};

// INVALID_ARGUMENT as MakePlan has it, but of the tokens and the stripe, which TokenLayout::Make looks at.
absl::Status CheckPlanRequest(const ModelShape& model, const PlanRequest& request);

// Every number of head groups that the model and the pool allow.
std::vector<int> HeadGroupCounts(const ModelShape& model, int ranks);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLAN_REQUEST_H_
