// The schedules of a shape that a planner compares, where one message is under way at a time.
#ifndef MESHFILL_ENGINE_PLAN_SHAPE_SCHEDULES_H_
#define MESHFILL_ENGINE_PLAN_SHAPE_SCHEDULES_H_

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_shape.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

// A schedule has a vector for each step: none is copied before the plan is chosen.
using SharedSchedule = std::shared_ptr<const Schedule>;

// Schedules depend on a tile and on costs that are small whole numbers: many plans share one.
class ShapeSchedules {
 public:
  explicit ShapeSchedules(ScheduleChoice choice) : choice_(choice) {}

  // Algorithm 2's first.
  std::vector<SharedSchedule> Of(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

 private:
  // By tile and costs.
  using Made = std::map<std::tuple<int, int, int, int, int>, SharedSchedule>;

  static SharedSchedule Make(Schedule (*make)(Tile, OverlapCosts), Tile tile, OverlapCosts costs, Made& made);

  const ScheduleChoice choice_;
  Made greedy_;
  Made optimal_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_SHAPE_SCHEDULES_H_
