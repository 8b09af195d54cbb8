// Plans one shape, of h head groups and an a × b tile, in every way that the caller leaves open (planner.h
// has the list, and what wins).
#ifndef MESHFILL_ENGINE_PLAN_SHAPE_PLANNER_H_
#define MESHFILL_ENGINE_PLAN_SHAPE_PLANNER_H_

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/placement.h"
#include "engine/model/model_shape.h"
#include "engine/plan/placed_links.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_request.h"
#include "engine/plan/plan_shape.h"
#include "engine/plan/rank_speed.h"
#include "engine/plan/shape_schedules.h"

namespace meshfill {

// A plan that is compared with others.
struct SketchedPlan : PlanShape {
  Placement placement;
  SharedSchedule schedule;
  Prediction predicted;
};

// Plans shapes. What it is made of outlives it.
class ShapePlanner {
 public:
  ShapePlanner(const ModelShape& model, const PoolSpeed& speed, const PlanRequest& request);

  // The fastest plan of the shape that fits the memory budget; if none does, the one that needs least.
  SketchedPlan Best(int heads, Tile tile);

  // By what plans of different shapes are compared: predicted seconds, and what its longer stripes may add.
  double UnevenSeconds(const SketchedPlan& plan) const;
  // Whether a plan is taken instead of a faster one of another shape: its layout wins ties with the other's.
  bool WinsTie(const SketchedPlan& plan, const SketchedPlan& faster) const;

 private:
  // Plans the shape in every layout and wire dtype. Puts what is better into `best`.
  void TryPlacement(int heads, Tile tile, const PlacedLinks& placed, std::optional<SketchedPlan>& best);
  // Plans the shape with a double ring of KV in each placement in which several ranks of a KV group are in a
  // node: they, or even parts of them, form inner rings. `ideal` has the shape, and the links inside nodes
  // for all messages.
  void TryDoubleRings(PlanShape ideal, std::optional<SketchedPlan>& best);
  // `many_alone`: of the schedules, that with several messages at once alone.
  void TrySchedules(const PlanShape& shape, const Placement& placement, bool many_alone,
                    std::optional<SketchedPlan>& best);

  int64_t ExchangeTokensOf(const PlanShape& shape) const;
  // Spares the schedules of a shape that none can make faster, with messages along all rings at once or not.
  bool MayGain(const PlanShape& shape, bool many_rings, const SketchedPlan& best) const;
  bool ManyRings(const PlanShape& shape) const;

  bool Over(const Prediction& predicted) const;
  // Slower than a plan that fits, so that its memory does not matter.
  bool IsSlower(const Prediction& predicted, const Prediction& best) const;
  // Orders schedules of the same shape, the best first.
  std::tuple<bool, double, int64_t> OrderOf(const Prediction& predicted) const;
  bool IsBetter(const Prediction& predicted, const Prediction& best, double least_gain) const;
  // For which a plan of this shape is taken instead of `best`: what longer stripes make less even comes on
  // top.
  double LeastGainOf(const PlanShape& shape, const PlanShape& best) const;
  // What the last rank has more of full layers than with the stripes that were asked for, as a part: no
  // prediction counts that.
  double Unevenness(const TokenLayout& layout) const;

  const ModelShape& model_;
  const PoolSpeed& speed_;
  const PlanRequest& request_;
  const std::vector<TokenLayout> layouts_;
  ShapeSchedules schedules_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_SHAPE_PLANNER_H_
