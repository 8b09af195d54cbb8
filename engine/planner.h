// Chooses the plan (Mesh-Attention Figure 6): each factorisation is scheduled and timed, the best taken.
#ifndef MESHFILL_ENGINE_PLANNER_H_
#define MESHFILL_ENGINE_PLANNER_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/cost_model.h"
#include "engine/model_shape.h"
#include "engine/plan.h"

namespace meshfill {

enum class ScheduleChoice {
  kAuto,    // the one that is predicted to take less time
  kGreedy,  // Algorithm 2, as the paper has it
};

struct PlanRequest {
  int64_t tokens = 0;
  int ranks = 1;
  LayoutKind layout = LayoutKind::kStriped;
  int64_t stripe = 64;
  std::optional<Tile> tile = std::nullopt;  // fixed by the caller
  std::optional<int> heads = std::nullopt;  // fixed by the caller
  DType partial_dtype = DType::kF32;
  ScheduleChoice schedule = ScheduleChoice::kAuto;
  int64_t memory_budget_bytes = 0;  // activations of all ranks; 0: no limit
};

// Candidates are the shapes that fit the memory budget (the one shape, where the caller fixed it), by
// predicted seconds, then by bytes sent, then by peak memory. The plan is the first; its schedule has passed
// CheckSchedule. INVALID_ARGUMENT: no tokens, a tile that does not multiply to the ranks, bad options.
// FAILED_PRECONDITION: no shape fits the memory budget (the message has both numbers).
absl::StatusOr<PlanChoice> MakePlan(const ModelShape& model, const PoolSpeed& speed,
                                    const PlanRequest& request);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLANNER_H_
