#include "engine/plan/planner.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/plan/shape_planner.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Smaller is better; no two shapes are equal.
auto OrderOf(const ShapePlanner& planner, const SketchedPlan& plan) {
  return std::make_tuple(planner.UnevenSeconds(plan), plan.predicted.comm_bytes.total(),
                         plan.predicted.run_bytes, plan.heads, plan.tile.a);
}

// The shapes that the caller leaves open.
std::vector<std::pair<int, Tile>> ShapesOf(const ModelShape& model, const PlanRequest& request) {
  if (request.tile.has_value()) return {{request.heads.value_or(1), *request.tile}};
  std::vector<std::pair<int, Tile>> shapes;
  for (int heads : HeadGroupCounts(model, request.ranks)) {
    if (request.heads.value_or(heads) != heads) continue;
    for (Tile tile : TilesOf(request.ranks / heads)) shapes.emplace_back(heads, tile);
  }
  return shapes;
}

absl::Status NothingFits(const std::vector<SketchedPlan>& plans, const PlanRequest& request) {
  const SketchedPlan& smallest =
      *std::min_element(plans.begin(), plans.end(), [](const SketchedPlan& x, const SketchedPlan& y) {
        return x.predicted.run_bytes < y.predicted.run_bytes;
      });
  const int64_t passing = request.weights.run_bytes;
  return absl::FailedPreconditionError(absl::StrCat(
      "a prompt of ", request.tokens, " tokens needs at least ", smallest.predicted.run_bytes + passing,
      " bytes of activations", passing == 0 ? "" : " and of layers that pass", " on ", request.ranks,
      request.ranks == 1 ? " rank (" : " ranks (", smallest.heads, " head group",
      smallest.heads == 1 ? "" : "s", " of ", smallest.tile.DebugString(),
      "), more than the memory budget of ", request.memory_budget_bytes,
      " bytes: send a shorter prompt or raise the budget"));
}

}  // namespace

absl::StatusOr<PlanChoice> MakePlan(const ModelShape& model, const PoolSpeed& speed,
                                    const PlanRequest& request) {
  RETURN_IF_ERROR(CheckPoolSpeed(speed));
  RETURN_IF_ERROR(TokenLayout::Make(request.layout.value_or(LayoutKind::kStriped), request.ranks,
                                    request.tokens, request.stripe)
                      .status());
  RETURN_IF_ERROR(CheckPlanRequest(model, request));

  // Weights change no choice but by their memory: the same shape wins however they come, and computes the
  // same bits.
  PlanRequest activations = request;
  if (request.memory_budget_bytes != 0) {
    activations.memory_budget_bytes =
        std::max<int64_t>(1, request.memory_budget_bytes - request.weights.run_bytes);
  }
  ShapePlanner planner(model, speed, activations);
  std::vector<SketchedPlan> plans;
  for (auto [heads, tile] : ShapesOf(model, request)) plans.push_back(planner.Best(heads, tile));
  if (const int64_t budget = activations.memory_budget_bytes; budget != 0) {
    const auto over = [budget](const SketchedPlan& plan) { return plan.predicted.run_bytes > budget; };
    if (std::all_of(plans.begin(), plans.end(), over)) return NothingFits(plans, request);
    std::erase_if(plans, over);
  }
  std::sort(plans.begin(), plans.end(), [&](const SketchedPlan& x, const SketchedPlan& y) {
    return OrderOf(planner, x) < OrderOf(planner, y);
  });
  auto taken = plans.begin();
  for (auto plan = plans.begin(); plan != plans.end(); ++plan) {
    if (planner.WinsTie(*plan, *taken)) taken = plan;
  }
  std::rotate(plans.begin(), taken, taken + 1);

  std::vector<PlanCandidate> candidates;
  for (SketchedPlan& plan : plans) {
    CountWeights(request.weights, model.layers, plan.predicted);
    candidates.push_back({plan, plan.placement.name, plan.predicted});
  }
  SketchedPlan& best = plans.front();
  RETURN_IF_ERROR(CheckSchedule(*best.schedule));
  return PlanChoice{.plan = {best, PlanSliceTokens(best, speed.slice_tokens), std::move(best.placement),
                             *best.schedule, best.predicted},
                    .candidates = std::move(candidates),
                    .pieces = {},
                    .weights = request.weights};
}

}  // namespace meshfill
