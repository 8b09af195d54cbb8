// Chooses the plan (Mesh-Attention Figure 6): each factorisation is scheduled and timed, the best taken.
// Beyond the paper, a shape may have head groups (n = h·a·b), and is scheduled by Algorithm 2 and for least
// time (optimal_schedule.h); the faster of them stands for it, Algorithm 2's where they tie in time and peak
// memory.
#ifndef MESHFILL_ENGINE_PLANNER_H_
#define MESHFILL_ENGINE_PLANNER_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/cost_model.h"
#include "engine/model_shape.h"
#include "engine/plan.h"

namespace meshfill {

struct PlanRequest {
  int64_t tokens = 0;         // of the prompt
  int64_t cached_tokens = 0;  // before it, whose keys and values are there already
  int ranks = 1;
  LayoutKind layout = LayoutKind::kStriped;
  int64_t stripe = 64;
  std::optional<Tile> tile = std::nullopt;  // fixed by the caller
  std::optional<int> heads = std::nullopt;  // fixed by the caller; a tile without it means one head group
  DType partial_dtype = DType::kF32;
  ScheduleChoice schedule = ScheduleChoice::kAuto;
  int64_t memory_budget_bytes = 0;  // activations of all ranks; 0: no limit
};

// Candidates are the shapes h · a × b that the model's heads allow and that fit the memory budget (of those,
// the ones that the caller's tile and head groups leave), by predicted seconds, then by bytes sent, then by
// peak memory. The plan is the first; its schedule has passed CheckSchedule. INVALID_ARGUMENT: no tokens,
// head groups that the heads or the ranks do not allow (the message has those that they do), a tile that does
// not multiply to the ranks, bad options. FAILED_PRECONDITION: no shape fits the memory budget (the message
// has both numbers).
absl::StatusOr<PlanChoice> MakePlan(const ModelShape& model, const PoolSpeed& speed,
                                    const PlanRequest& request);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLANNER_H_
