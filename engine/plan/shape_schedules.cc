#include "engine/plan/shape_schedules.h"

#include <memory>
#include <vector>

#include "engine/schedule/optimal_schedule.h"

namespace meshfill {

SharedSchedule ShapeSchedules::Make(Schedule (*make)(Tile, OverlapCosts), Tile tile, OverlapCosts costs,
                                    Made& made) {
  SharedSchedule& schedule = made[{tile.a, tile.b, costs.c_q, costs.c_kv, costs.c_o}];
  if (schedule == nullptr) schedule = std::make_shared<const Schedule>(make(tile, costs));
  return schedule;
}

std::vector<SharedSchedule> ShapeSchedules::Of(const ModelShape& model, const PoolSpeed& speed,
                                               const PlanShape& shape) {
  const OverlapCosts costs = OverlapCostsOf(model, speed, shape);
  std::vector<SharedSchedule> schedules = {Make(GreedySchedule, shape.tile, costs, greedy_)};
  if (choice_ == ScheduleChoice::kGreedy) return schedules;
  schedules.push_back(Make(OptimalSchedule, shape.tile, costs, optimal_));
  // Least time counts in whole blocks. Where a transfer takes 1.1 of them, two blocks beside it are right
  // if all transfers together hide too little, and one if they hide enough.
  const OverlapCosts covered = CoveredBlocksOf(model, speed, shape);
  if (covered != costs) schedules.push_back(Make(OptimalSchedule, shape.tile, covered, optimal_));
  return schedules;
}

}  // namespace meshfill
