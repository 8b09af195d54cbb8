#include "engine/planner.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/optimal_schedule.h"

namespace meshfill {
namespace {

absl::Status CheckModelAndSpeed(const ModelShape& model, const PoolSpeed& speed) {
  if (model.layers < 1 || model.q_heads < 1 || model.kv_heads < 1 || model.head_dim < 1 ||
      model.q_heads % model.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot plan for a model of ", model.layers, " layers, ",
                                                   model.q_heads, " query heads, ", model.kv_heads,
                                                   " KV heads of ", model.head_dim));
  }
  if (!(speed.gemm_flops_per_second > 0 && speed.attention_flops_per_second > 0 &&
        speed.merge_bytes_per_second > 0 && speed.link_bytes_per_second > 0 &&
        speed.lm_head_bytes_per_second > 0 && speed.lone_rank_speedup >= 1 &&
        speed.link_latency_seconds >= 0 && speed.slice_seconds >= 0 && speed.block_row_seconds >= 0 &&
        speed.token_seconds >= 0 && speed.start_seconds >= 0)) {
    return absl::InvalidArgumentError("the pool's speeds must be positive: measure or configure them");
  }
  return absl::OkStatus();
}

// Every number of head groups that the model and the pool allow.
std::vector<int> HeadGroupCounts(const ModelShape& model, int ranks) {
  std::vector<int> counts;
  for (int h = 1; h <= std::min(ranks, model.q_heads); ++h) {
    if (ranks % h == 0 && model.CanSplitHeads(h)) counts.push_back(h);
  }
  return counts;
}

absl::Status CheckShape(const ModelShape& model, const PlanRequest& request) {
  const int heads = request.heads.value_or(1);
  const std::vector<int> possible = HeadGroupCounts(model, request.ranks);
  if (std::find(possible.begin(), possible.end(), heads) == possible.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        heads, " head groups of ", request.ranks, " ranks cannot share ", model.q_heads, " query heads and ",
        model.kv_heads, " KV heads; possible numbers of head groups: ", absl::StrJoin(possible, ", ")));
  }
  if (!request.tile.has_value()) return absl::OkStatus();
  const auto [a, b] = *request.tile;
  if (a >= 1 && b >= 1 && int64_t{a} * b * heads == request.ranks) return absl::OkStatus();
  const std::string groups = heads == 1 ? "" : absl::StrCat(" with ", heads, " head groups");
  return absl::InvalidArgumentError(absl::StrCat("tile ", request.tile->DebugString(), groups,
                                                 " does not multiply to the ", request.ranks,
                                                 " ranks of the pool"));
}

absl::Status CheckRequest(const ModelShape& model, const PlanRequest& request) {
  if (absl::Status status = CheckShape(model, request); !status.ok()) return status;
  if (request.partial_dtype != DType::kF32 && request.partial_dtype != DType::kBf16) {
    return absl::InvalidArgumentError(absl::StrCat("partial outputs cannot travel in ",
                                                   DTypeName(request.partial_dtype), ": use f32 or bf16"));
  }
  if (request.cached_tokens < 0 || request.cached_tokens + request.tokens >= int64_t{1} << 31) {
    return absl::InvalidArgumentError(absl::StrCat(request.cached_tokens, " cached tokens before ",
                                                   request.tokens, ": use 0 or more, below 2^31 together"));
  }
  if (request.memory_budget_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory budget of ", request.memory_budget_bytes, " bytes: use 0 for no limit"));
  }
  return absl::OkStatus();
}

// Smaller is better; no two shapes are equal.
auto OrderOf(const Plan& plan) {
  return std::make_tuple(plan.predicted.seconds, plan.predicted.comm_bytes.total(), plan.predicted.peak_bytes,
                         plan.heads, plan.tile.a);
}

std::vector<Schedule> SchedulesOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                                  int heads, Tile tile, const PlanRequest& request) {
  const OverlapCosts costs =
      OverlapCostsOf(model, speed, layout, heads, tile, request.partial_dtype, request.cached_tokens);
  std::vector<Schedule> schedules = {GreedySchedule(tile, costs)};
  if (request.schedule == ScheduleChoice::kGreedy) return schedules;
  schedules.push_back(OptimalSchedule(tile, costs));
  // Least time counts in whole blocks. Where a transfer takes 1.1 of them, two blocks beside it are right if
  // all transfers together hide too little, and one if they hide enough.
  const OverlapCosts covered =
      CoveredBlocksOf(model, speed, layout, heads, tile, request.partial_dtype, request.cached_tokens);
  if (covered != costs) schedules.push_back(OptimalSchedule(tile, covered));
  return schedules;
}

// The fastest schedule that fits the memory budget; if none does, the one that needs least.
Plan BestOfShape(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout, int heads,
                 Tile tile, const PlanRequest& request) {
  const auto order_of = [&request](const Prediction& predicted) {
    const bool over = request.memory_budget_bytes != 0 && predicted.peak_bytes > request.memory_budget_bytes;
    return std::make_tuple(over, over ? 0 : predicted.seconds, predicted.peak_bytes);
  };
  std::optional<Plan> best;
  for (Schedule& schedule : SchedulesOf(model, speed, layout, heads, tile, request)) {
    const Prediction predicted =
        Predict(model, speed, layout, heads, schedule, request.partial_dtype, request.cached_tokens);
    if (best.has_value() && order_of(predicted) >= order_of(best->predicted)) continue;
    best = Plan{.layout = layout,
                .heads = heads,
                .tile = tile,
                .partial_dtype = request.partial_dtype,
                .schedule = std::move(schedule),
                .predicted = predicted};
  }
  return *std::move(best);
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

}  // namespace

absl::StatusOr<PlanChoice> MakePlan(const ModelShape& model, const PoolSpeed& speed,
                                    const PlanRequest& request) {
  if (absl::Status status = CheckModelAndSpeed(model, speed); !status.ok()) return status;
  absl::StatusOr<TokenLayout> layout =
      TokenLayout::Make(request.layout, request.ranks, request.tokens, request.stripe);
  if (!layout.ok()) return layout.status();
  if (absl::Status status = CheckRequest(model, request); !status.ok()) return status;

  std::vector<Plan> plans;
  for (auto [heads, tile] : ShapesOf(model, request)) {
    plans.push_back(BestOfShape(model, speed, *layout, heads, tile, request));
  }
  if (const int64_t budget = request.memory_budget_bytes; budget != 0) {
    const auto by_peak = [](const Plan& x, const Plan& y) {
      return x.predicted.peak_bytes < y.predicted.peak_bytes;
    };
    const int64_t smallest = std::min_element(plans.begin(), plans.end(), by_peak)->predicted.peak_bytes;
    if (smallest > budget) {
      return absl::FailedPreconditionError(absl::StrCat("a prompt of ", request.tokens, " tokens needs ",
                                                        smallest, " bytes of activations on ", request.ranks,
                                                        " ranks, more than the memory budget of ", budget,
                                                        " bytes: send a shorter prompt or raise the budget"));
    }
    std::erase_if(plans, [budget](const Plan& plan) { return plan.predicted.peak_bytes > budget; });
  }
  std::sort(plans.begin(), plans.end(), [](const Plan& x, const Plan& y) { return OrderOf(x) < OrderOf(y); });

  std::vector<PlanCandidate> candidates;
  for (const Plan& plan : plans) {
    candidates.push_back({.heads = plan.heads, .tile = plan.tile, .predicted = plan.predicted});
  }
  if (absl::Status status = CheckSchedule(plans.front().schedule); !status.ok()) return status;
  return PlanChoice{.plan = std::move(plans.front()), .candidates = std::move(candidates)};
}

}  // namespace meshfill
