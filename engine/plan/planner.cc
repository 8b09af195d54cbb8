#include "engine/plan/planner.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/plan/comm_bytes.h"
#include "engine/schedule/optimal_schedule.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

absl::Status CheckModel(const ModelShape& model) {
  if (model.layers < 1 || model.q_heads < 1 || model.kv_heads < 1 || model.head_dim < 1 ||
      model.q_heads % model.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot plan for a model of ", model.layers, " layers, ",
                                                   model.q_heads, " query heads, ", model.kv_heads,
                                                   " KV heads of ", model.head_dim));
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
                                                 " ranks of the pool; give one that does, as 1x",
                                                 request.ranks / heads, ", or a pool of as many ranks"));
}

absl::Status CheckRequest(const ModelShape& model, const PlanRequest& request) {
  RETURN_IF_ERROR(CheckShape(model, request));
  if (request.partial_dtype.value_or(DType::kF32) != DType::kF32 && request.partial_dtype != DType::kBf16) {
    return absl::InvalidArgumentError(absl::StrCat("partial outputs cannot travel in ",
                                                   DTypeName(*request.partial_dtype), ": use f32 or bf16"));
  }
  if (!request.topology.node_of_seat.empty()) {
    RETURN_IF_ERROR(CheckTopology(request.topology));
    if (std::ssize(request.topology.node_of_seat) < request.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("a topology of ", request.topology.node_of_seat.size(),
                                                     " seats for ", request.ranks,
                                                     " ranks: give one for each"));
    }
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

// The layouts that a plan may have, those that win ties first: stripes, and contiguous chunks if they send
// least, as where all layers have a window, unless the prompt's keys are kept, which others may follow.
std::vector<TokenLayout> LayoutsOf(const ModelShape& model, const PlanRequest& request) {
  std::vector<LayoutKind> kinds = {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous};
  bool windows = true;
  model.ForEachWindow([&](int64_t window, int) { windows = windows && window > 0; });
  if (windows && !request.keeps_kv) std::swap(kinds.front(), kinds.back());
  if (request.layout.has_value()) kinds = {*request.layout};
  std::vector<TokenLayout> layouts;
  for (LayoutKind kind : kinds) {
    layouts.push_back(TokenLayout::Make(kind, request.ranks, request.tokens, request.stripe).value());
  }
  return layouts;
}

std::vector<DType> PartialDTypesOf(const PlanRequest& request) {
  if (request.partial_dtype.has_value()) return {*request.partial_dtype};
  return {DType::kF32, DType::kBf16};
}

// A schedule has a vector for each step: none is copied before the plan is chosen.
using SharedSchedule = std::shared_ptr<const Schedule>;

// Schedules depend on a tile and on costs that are small whole numbers: many plans share one.
class Schedules {
 public:
  explicit Schedules(ScheduleChoice choice) : choice_(choice) {}

  // Algorithm 2's first.
  std::vector<SharedSchedule> Of(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
    const OverlapCosts costs = OverlapCostsOf(model, speed, shape);
    std::vector<SharedSchedule> schedules = {Made(greedy_, GreedySchedule, shape.tile, costs)};
    if (choice_ == ScheduleChoice::kGreedy) return schedules;
    schedules.push_back(Made(optimal_, OptimalSchedule, shape.tile, costs));
    // Least time counts in whole blocks. Where a transfer takes 1.1 of them, two blocks beside it are right
    // if all transfers together hide too little, and one if they hide enough.
    const OverlapCosts covered = CoveredBlocksOf(model, speed, shape);
    if (covered != costs) schedules.push_back(Made(optimal_, OptimalSchedule, shape.tile, covered));
    return schedules;
  }

 private:
  using Key = std::tuple<int, int, int, int, int>;  // tile, costs
  using Map = std::map<Key, SharedSchedule>;

  static SharedSchedule Made(Map& made, Schedule (*make)(Tile, OverlapCosts), Tile tile, OverlapCosts costs) {
    SharedSchedule& schedule = made[{tile.a, tile.b, costs.c_q, costs.c_kv, costs.c_o}];
    if (schedule == nullptr) schedule = std::make_shared<const Schedule>(make(tile, costs));
    return schedule;
  }

  const ScheduleChoice choice_;
  Map greedy_;
  Map optimal_;
};

// Where the ranks of a shape may sit, and the links that its messages then have.
struct PlacedLinks {
  Placement placement;
  int kv_inner = 0;
  Links links;

  // Both of one KV ring.
  bool NoFasterThan(const PlacedLinks& other) const {
    const auto slower = [](const Link& link, const Link& than) {
      return link.latency_seconds >= than.latency_seconds && link.bytes_per_second <= than.bytes_per_second;
    };
    return std::all_of(kPrefillTraffics.begin(), kPrefillTraffics.end(), [&](Traffic traffic) {
      return slower(links[traffic], other.links[traffic]) &&
             slower(SharedLink(traffic), other.SharedLink(traffic));
    });
  }

 private:
  // The slower one of those that both rings have.
  const Link& SharedLink(Traffic traffic) const {
    const Link& port = links.shared_port[traffic];
    return port == Link{} ? links.shared_inside[traffic] : port;
  }
};

// Ranks in the order of the seats.
PlacedLinks RowFirstLinks(const PoolSpeed& speed, const PlanRequest& request, int heads, Tile tile) {
  PlacedLinks placed;
  const bool placed_nowhere = request.topology.node_of_seat.empty();
  placed.links = placed_nowhere ? Links(Links::Alike(speed.link()))
                                : LinksOf(request.topology, heads, tile, RowFirst(request.ranks));
  return placed;
}

// Ranks of a KV group that share the first one's node, side by side.
int KvRanksInANode(const Topology& topology, int heads, Tile tile, const Placement& placement) {
  const Grid grid = MeshGrid(heads, tile);
  const auto node = [&](int y) { return topology.node_of_seat[placement.seat_of_rank[grid.Rank(0, y, 0)]]; };
  int ranks = 1;
  while (ranks < tile.b && node(ranks) == node(0)) ++ranks;
  return ranks;
}

// The boxes that may be faster than that, and than each other.
std::vector<PlacedLinks> BoxedLinks(const PlanRequest& request, int heads, Tile tile,
                                    const PlacedLinks& row_first) {
  std::vector<PlacedLinks> kept;
  const int seats_per_node = SeatsPerNode(request.topology, request.ranks);
  for (Placement& placement : PlacementsOf(MeshGrid(heads, tile), seats_per_node)) {
    PlacedLinks placed;
    placed.placement = std::move(placement);
    placed.links = LinksOf(request.topology, heads, tile, placed.placement);
    const auto no_better = [&](const PlacedLinks& other) { return placed.NoFasterThan(other); };
    if (no_better(row_first) || std::any_of(kept.begin(), kept.end(), no_better)) continue;
    std::erase_if(kept, [&](const PlacedLinks& other) { return other.NoFasterThan(placed); });
    kept.push_back(std::move(placed));
  }
  return kept;
}

// A plan that is compared with others.
struct SketchedPlan : PlanShape {
  Placement placement;
  SharedSchedule schedule;
  Prediction predicted;
};

// Plans shapes.
class ShapePlanner {
 public:
  ShapePlanner(const ModelShape& model, const PoolSpeed& speed, const PlanRequest& request)
      : model_(model),
        speed_(speed),
        request_(request),
        layouts_(LayoutsOf(model, request)),
        schedules_(request.schedule) {}

  // The fastest plan of the shape that fits the memory budget; if none does, the one that needs least.
  SketchedPlan Best(int heads, Tile tile) {
    std::optional<SketchedPlan> best;
    const PlacedLinks row_first = RowFirstLinks(speed_, request_, heads, tile);
    TryPlacement(heads, tile, row_first, best);
    if (!request_.topology.node_of_seat.empty()) {
      PlanShape ideal = *best;
      ideal.links = Links::Alike(request_.topology.same_node);
      ideal.links.shared_inside = {};
      ideal.exchange_tokens = ExchangeTokensOf(ideal);
      if (MayGain(ideal, ManyRings(ideal), *best)) {
        for (const PlacedLinks& boxed : BoxedLinks(request_, heads, tile, row_first)) {
          TryPlacement(heads, tile, boxed, best);
        }
      }
      ideal.kv_inner = LeastInnerRing(tile);
      if (ideal.kv_inner != 0 && ManyRings(ideal) && MayGain(ideal, true, *best)) TryDoubleRings(ideal, best);
    }
    best->predicted.comm_bytes = PrefillCommBytes(model_, *best);
    return *std::move(best);
  }

 private:
  // Plans the shape in every layout and wire dtype. Puts what is better into `best`.
  void TryPlacement(int heads, Tile tile, const PlacedLinks& placed, std::optional<SketchedPlan>& best) {
    for (const TokenLayout& layout : layouts_) {
      PlanShape shape = {.layout = layout,
                         .heads = heads,
                         .tile = tile,
                         .kv_inner = placed.kv_inner,
                         .cached_tokens = request_.cached_tokens,
                         .links = placed.links,
                         .keeps_kv = request_.keeps_kv,
                         .kv_on_host = request_.kv_on_host,
                         .one_memory = request_.one_memory};
      shape.exchange_tokens = ExchangeTokensOf(shape);
      for (DType partial_dtype : PartialDTypesOf(request_)) {
        shape.partial_dtype = partial_dtype;
        if (best.has_value() && !MayGain(shape, ManyRings(shape), *best)) continue;
        const bool many_alone =
            best.has_value() && ManyRings(shape) && (shape.kv_inner != 0 || !MayGain(shape, false, *best));
        TrySchedules(shape, placed.placement, many_alone, best);
      }
    }
  }

  // Plans the shape with a double ring of KV in each placement in which several ranks of a KV group are in a
  // node: they form an inner ring. `ideal` has the shape, and the links inside nodes for all messages.
  void TryDoubleRings(PlanShape ideal, std::optional<SketchedPlan>& best) {
    const auto [heads, tile] = std::pair(ideal.heads, ideal.tile);
    const Topology& topology = request_.topology;
    const int seats_per_node = SeatsPerNode(topology, request_.ranks);
    // All ranks of a node send along outer rings, and to other nodes.
    ideal.links.kv_outer.link = {
        .latency_seconds = topology.between_nodes.latency_seconds,
        .bytes_per_second = std::min(topology.between_nodes.bytes_per_second,
                                     topology.node_bytes_per_second / seats_per_node)};
    std::vector<Placement> placements = PlacementsOf(MeshGrid(heads, tile), seats_per_node);
    for (Placement& placement : placements) {
      const bool row_first = &placement == &placements.front();
      ideal.kv_inner = KvRanksInANode(topology, heads, tile, placement);
      if (ideal.kv_inner == 1 || !CanSplitKvRing(tile, ideal.kv_inner)) continue;
      if (!MayGain(ideal, true, *best)) continue;
      PlacedLinks placed;
      placed.kv_inner = ideal.kv_inner;
      placed.links = LinksOf(topology, heads, tile, placement, ideal.kv_inner);
      if (!row_first) placed.placement = std::move(placement);
      TryPlacement(heads, tile, placed, best);
    }
  }

  int64_t ExchangeTokensOf(const PlanShape& shape) const {
    const bool may = request_.hides_exchanges && request_.weights.mode == WeightMode::kResident;
    return may ? BestExchangeTokens(model_, speed_, shape) : 0;
  }

  // Spares the schedules of a shape that none can make faster, with messages along all rings at once or not.
  bool MayGain(const PlanShape& shape, bool many_rings, const SketchedPlan& best) const {
    return Over(best.predicted) ||
           LeastSeconds(model_, speed_, shape, many_rings) < best.predicted.seconds * (1 - kLeastGain);
  }

  bool ManyRings(const PlanShape& shape) const {
    return request_.many_rings && request_.schedule == ScheduleChoice::kAuto &&
           ((shape.tile.a > 1 && shape.tile.b > 1) || shape.kv_inner != 0);
  }

  // The inner rings that leave least to themselves: no double ring sends less along its inner rings.
  static int LeastInnerRing(Tile tile) {
    for (int ranks = 2; ranks < tile.b; ++ranks) {
      if (tile.b % ranks == 0) return ranks;
    }
    return 0;
  }

  // `many_alone`: of the schedules, that with several messages at once alone.
  void TrySchedules(const PlanShape& shape, const Placement& placement, bool many_alone,
                    std::optional<SketchedPlan>& best) {
    std::optional<SketchedPlan> best_here;
    const auto one_message =
        many_alone ? std::vector<SharedSchedule>() : schedules_.Of(model_, speed_, shape);
    for (const SharedSchedule& schedule : one_message) {
      Prediction predicted = PredictTime(model_, speed_, shape, *schedule);
      if (best_here.has_value() && IsSlower(predicted, best_here->predicted)) continue;
      PredictMemory(model_, speed_, shape, *schedule, predicted);
      if (best_here.has_value() && OrderOf(predicted) >= OrderOf(best_here->predicted)) continue;
      best_here = {shape, {}, schedule, predicted};
    }
    if (many_alone || (ManyRings(shape) && best_here->predicted.comm_wait_seconds > 0)) {
      const Prediction& other = many_alone ? best->predicted : best_here->predicted;
      auto schedule = std::make_shared<const Schedule>(
          MultiRingSchedule(shape.tile, shape.kv_inner, RingSecondsOf(model_, speed_, shape)));
      Prediction predicted = PredictTime(model_, speed_, shape, *schedule);
      if (!IsSlower(predicted, other)) {
        PredictMemory(model_, speed_, shape, *schedule, predicted);
        if (IsBetter(predicted, other)) best_here = {shape, {}, std::move(schedule), predicted};
      }
    }
    if (!best_here.has_value()) return;
    if (shape.exchanges() > 1) {
      PlanShape at_once = shape;
      at_once.exchange_tokens = 0;
      Prediction predicted = PredictTime(model_, speed_, at_once, *best_here->schedule);
      PredictMemory(model_, speed_, at_once, *best_here->schedule, predicted);
      if (!IsBetter(best_here->predicted, predicted)) {
        best_here = {at_once, {}, std::move(best_here->schedule), predicted};
      }
    }
    if (best.has_value() && !IsBetter(best_here->predicted, best->predicted)) return;
    best = std::move(best_here);
    best->placement = placement;
  }

  bool Over(const Prediction& predicted) const {
    return request_.memory_budget_bytes != 0 && predicted.run_bytes > request_.memory_budget_bytes;
  }

  // Slower than a plan that fits, so that its memory does not matter.
  bool IsSlower(const Prediction& predicted, const Prediction& best) const {
    return !Over(best) && predicted.seconds > best.seconds;
  }

  // Orders schedules of the same shape, the best first.
  std::tuple<bool, double, int64_t> OrderOf(const Prediction& predicted) const {
    return {Over(predicted), Over(predicted) ? 0 : predicted.seconds, predicted.run_bytes};
  }

  bool IsBetter(const Prediction& predicted, const Prediction& best) const {
    if (Over(predicted) || Over(best)) return OrderOf(predicted) < OrderOf(best);
    return predicted.seconds < best.seconds * (1 - kLeastGain);
  }

  // Least gain for which another layout, wire dtype or placement is taken: a smaller one is within the error
  // of any prediction.
  static constexpr double kLeastGain = 0.01;

  const ModelShape& model_;
  const PoolSpeed& speed_;
  const PlanRequest& request_;
  const std::vector<TokenLayout> layouts_;
  Schedules schedules_;
};

// Smaller is better; no two shapes are equal.
auto OrderOf(const SketchedPlan& plan) {
  return std::make_tuple(plan.predicted.seconds, plan.predicted.comm_bytes.total(), plan.predicted.run_bytes,
                         plan.heads, plan.tile.a);
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
  RETURN_IF_ERROR(CheckModel(model));
  RETURN_IF_ERROR(CheckPoolSpeed(speed));
  RETURN_IF_ERROR(TokenLayout::Make(request.layout.value_or(LayoutKind::kStriped), request.ranks,
                                    request.tokens, request.stripe)
                      .status());
  RETURN_IF_ERROR(CheckRequest(model, request));

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
  std::sort(plans.begin(), plans.end(),
            [](const SketchedPlan& x, const SketchedPlan& y) { return OrderOf(x) < OrderOf(y); });

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
