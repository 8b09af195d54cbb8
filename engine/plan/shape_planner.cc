#include "engine/plan/shape_planner.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/plan/comm_bytes.h"
#include "engine/plan/cost_model.h"
#include "engine/schedule/multi_ring_schedule.h"

namespace meshfill {
namespace {

// Least gain for which another placement, schedule or KV ring is taken.
constexpr double kLeastGain = 0.002;
// Least gain for which another layout or wire dtype is taken, or slices: they cost evenness, accuracy or
// memory, which no prediction of seconds counts.
constexpr double kLeastGainOfFormat = 0.01;
constexpr int kLongestWindow = 4;          // of a prompt's so many parts, for contiguous chunks to win ties
constexpr int64_t kLeastRounds = 8;        // of stripes that are longer than asked for
constexpr int64_t kMostRoundOfWindow = 8;  // times the longest window

// Stripes that are longer than the request's, in whose rounds a window ends: what nobody sees of them does
// not travel. With r rounds the last rank has 1/r more to do than the average, which no prediction counts.
std::vector<int64_t> LongStripes(const PlanRequest& request, int64_t window) {
  std::vector<int64_t> stripes;
  const int64_t longest = request.tokens / (request.ranks * kLeastRounds);
  for (int64_t stripe = 2 * request.stripe; stripe <= longest; stripe *= 2) {
    const int64_t round = request.ranks * stripe;
    if (round > kMostRoundOfWindow * window) break;
    if (round > window) stripes.push_back(stripe);
  }
  return stripes;
}

// The layouts that a plan may have, those that win ties first: stripes, and contiguous chunks where they send
// far less, as where all layers have a short window, unless the prompt's keys are kept, which others may
// follow. Ranks with contiguous chunks have unlike work, so that a tie of predictions is worth less.
std::vector<TokenLayout> LayoutsOf(const ModelShape& model, const PlanRequest& request) {
  std::vector<TokenLayout> layouts;
  const auto add = [&](LayoutKind kind, int64_t stripe) {
    layouts.push_back(TokenLayout::Make(kind, request.ranks, request.tokens, stripe).value());
  };
  if (request.layout.has_value()) {
    add(*request.layout, request.stripe);
    return layouts;
  }
  bool short_windows = true;
  int64_t longest = 0;
  model.ForEachWindow([&](int64_t window, int) {
    short_windows = short_windows && window > 0 && window <= request.tokens / kLongestWindow;
    longest = std::max(longest, window);
  });
  const bool contiguous_first = short_windows && !request.keeps_kv;
  if (contiguous_first) add(LayoutKind::kContiguous, request.stripe);
  add(LayoutKind::kStriped, request.stripe);
  if (longest > 0) {
    for (const int64_t stripe : LongStripes(request, longest)) add(LayoutKind::kStriped, stripe);
  }
  add(LayoutKind::kZigzag, request.stripe);
  if (!contiguous_first) add(LayoutKind::kContiguous, request.stripe);
  return layouts;
}

std::vector<DType> PartialDTypesOf(const PlanRequest& request) {
  if (request.partial_dtype.has_value()) return {*request.partial_dtype};
  return {DType::kF32, DType::kBf16};
}

// The inner rings that leave least to themselves: no double ring sends less along its inner rings.
int LeastInnerRing(Tile tile) {
  for (int ranks = 2; ranks < tile.b; ++ranks) {
    if (tile.b % ranks == 0) return ranks;
  }
  return 0;
}

}  // namespace

ShapePlanner::ShapePlanner(const ModelShape& model, const PoolSpeed& speed, const PlanRequest& request)
    : model_(model),
      speed_(speed),
      request_(request),
      layouts_(LayoutsOf(model, request)),
      schedules_(request.schedule) {}

SketchedPlan ShapePlanner::Best(int heads, Tile tile) {
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

bool ShapePlanner::WinsTie(const SketchedPlan& plan, const SketchedPlan& faster) const {
  const auto place = [&](const SketchedPlan& of) {
    return std::ranges::find(layouts_, of.layout.kind(), &TokenLayout::kind) - layouts_.begin();
  };
  return place(plan) < place(faster) &&
         !(UnevenSeconds(faster) < UnevenSeconds(plan) * (1 - kLeastGainOfFormat));
}

void ShapePlanner::TryPlacement(int heads, Tile tile, const PlacedLinks& placed,
                                std::optional<SketchedPlan>& best) {
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

void ShapePlanner::TryDoubleRings(PlanShape ideal, std::optional<SketchedPlan>& best) {
  const auto [heads, tile] = std::pair(ideal.heads, ideal.tile);
  const Topology& topology = request_.topology;
  const int seats_per_node = SeatsPerNode(topology, request_.ranks);
  // All ranks of a node send along outer rings, and to other nodes.
  ideal.links.kv_outer.link = {.latency_seconds = topology.between_nodes.latency_seconds,
                               .bytes_per_second = std::min(topology.between_nodes.bytes_per_second,
                                                            topology.node_bytes_per_second / seats_per_node)};
  const std::vector<Placement> placements = PlacementsOf(MeshGrid(heads, tile), seats_per_node);
  for (const Placement& placement : placements) {
    const bool row_first = &placement == &placements.front();
    const int in_node = KvRanksInANode(topology, heads, tile, placement);
    for (ideal.kv_inner = in_node; ideal.kv_inner > 1; --ideal.kv_inner) {
      if (in_node % ideal.kv_inner != 0 || !CanSplitKvRing(tile, ideal.kv_inner)) continue;
      if (!MayGain(ideal, true, *best)) continue;
      PlacedLinks placed;
      placed.kv_inner = ideal.kv_inner;
      placed.links = LinksOf(topology, heads, tile, placement, ideal.kv_inner);
      if (!row_first) placed.placement = placement;
      TryPlacement(heads, tile, placed, best);
    }
  }
}

int64_t ShapePlanner::ExchangeTokensOf(const PlanShape& shape) const {
  const bool may = request_.hides_exchanges && request_.weights.mode == WeightMode::kResident;
  return may ? BestExchangeTokens(model_, speed_, shape) : 0;
}

bool ShapePlanner::MayGain(const PlanShape& shape, bool many_rings, const SketchedPlan& best) const {
  return Over(best.predicted) || LeastSeconds(model_, speed_, shape, many_rings) <
                                     best.predicted.seconds * (1 - LeastGainOf(shape, best));
}

double ShapePlanner::LeastGainOf(const PlanShape& shape, const PlanShape& best) const {
  if (shape.layout == best.layout) {
    return shape.partial_dtype == best.partial_dtype ? kLeastGain : kLeastGainOfFormat;
  }
  return kLeastGainOfFormat + Unevenness(shape.layout) - Unevenness(best.layout);
}

double ShapePlanner::Unevenness(const TokenLayout& layout) const {
  if (layout.kind() != LayoutKind::kStriped) return 0;
  const int64_t longer = layout.stripe() - request_.stripe;
  return static_cast<double>(layout.ranks() * std::max<int64_t>(0, longer)) /
         static_cast<double>(layout.tokens());
}

double ShapePlanner::UnevenSeconds(const SketchedPlan& plan) const {
  return plan.predicted.seconds * (1 + Unevenness(plan.layout));
}

bool ShapePlanner::ManyRings(const PlanShape& shape) const {
  return request_.many_rings && request_.schedule == ScheduleChoice::kAuto &&
         ((shape.tile.a > 1 && shape.tile.b > 1) || shape.kv_inner != 0);
}

void ShapePlanner::TrySchedules(const PlanShape& shape, const Placement& placement, bool many_alone,
                                std::optional<SketchedPlan>& best) {
  std::optional<SketchedPlan> best_here;
  const auto one_message = many_alone ? std::vector<SharedSchedule>() : schedules_.Of(model_, speed_, shape);
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
      if (IsBetter(predicted, other, kLeastGain)) best_here = {shape, {}, std::move(schedule), predicted};
    }
  }
  if (!best_here.has_value()) return;
  if (shape.exchanges() > 1) {
    PlanShape at_once = shape;
    at_once.exchange_tokens = 0;
    Prediction predicted = PredictTime(model_, speed_, at_once, *best_here->schedule);
    PredictMemory(model_, speed_, at_once, *best_here->schedule, predicted);
    if (!IsBetter(best_here->predicted, predicted, kLeastGainOfFormat)) {
      best_here = {at_once, {}, std::move(best_here->schedule), predicted};
    }
  }
  if (best.has_value() && !IsBetter(best_here->predicted, best->predicted, LeastGainOf(shape, *best))) return;
  best = std::move(best_here);
  best->placement = placement;
}

bool ShapePlanner::Over(const Prediction& predicted) const {
  return request_.memory_budget_bytes != 0 && predicted.run_bytes > request_.memory_budget_bytes;
}

bool ShapePlanner::IsSlower(const Prediction& predicted, const Prediction& best) const {
  return !Over(best) && predicted.seconds > best.seconds;
}

std::tuple<bool, double, int64_t> ShapePlanner::OrderOf(const Prediction& predicted) const {
  return {Over(predicted), Over(predicted) ? 0 : predicted.seconds, predicted.run_bytes};
}

bool ShapePlanner::IsBetter(const Prediction& predicted, const Prediction& best, double least_gain) const {
  if (Over(predicted) || Over(best)) return OrderOf(predicted) < OrderOf(best);
  return predicted.seconds < best.seconds * (1 - least_gain);
}

}  // namespace meshfill
