#include "server/pool/pool_planner.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/mesh/topology.h"
#include "engine/plan/pieces.h"
#include "engine/plan/short_room.h"
#include "engine/prefill_request.h"
#include "kernels/return_if_error.h"
#include "server/config/config_units.h"

namespace meshfill {
namespace {

constexpr int kMostIdleRanks = 8;
constexpr Link kAssumedLink = {.latency_seconds = 200e-6, .bytes_per_second = 1e9};

PlanRequest RequestOf(const EngineOptions& defaults, const PoolCapacity& capacity, int64_t tokens,
                      const PrefillOptions& options) {
  PlanRequest request = PlanRequestOf(defaults, options, tokens);
  request.one_memory = false;
  request.keeps_kv = options.kv != nullptr;
  request.kv_on_host = capacity.kv_on_host;
  request.hides_exchanges = capacity.many_messages && !defaults.whole_exchanges;
  request.many_rings = capacity.many_messages;
  request.topology = capacity.topology;
  return request;
}

// Weights of `ranks` ranks.
PlanWeights WeightsOf(const PoolCapacity& capacity, int ranks) {
  if (capacity.rank_weights.mode != WeightMode::kSharded) return capacity.rank_weights.Share(ranks, 1);
  std::vector<int> nodes;
  for (int seat : capacity.first_seats) nodes.push_back(capacity.topology.node_of_seat[seat]);
  return SharedWeightsOf(capacity.rank_weights, capacity.topology, nodes);
}

absl::Status CheckShares(const PoolCapacity& capacity) {
  return CheckShares(capacity.rank_weights, static_cast<int>(capacity.first_seats.size()),
                     capacity.rank_memory_bytes);
}

// A worker that is idle would keep its share of the weights to itself.
bool NeedsAllRanks(const PoolCapacity& capacity, const PrefillOptions& options) {
  return options.tile.has_value() || capacity.rank_weights.mode == WeightMode::kSharded;
}

// Plans in pieces where the prompt does not fit whole.
absl::StatusOr<PlanChoice> PlanInPieces(const ModelShape& model, const EngineOptions& defaults,
                                        const PoolCapacity& capacity, PlanRequest request, int ranks,
                                        const PrefillOptions& options) {
  request.ranks = ranks;
  request.memory_budget_bytes = capacity.rank_memory_bytes * ranks;
  request.weights = WeightsOf(capacity, ranks);
  ASSIGN_OR_RETURN(PlanChoice choice,
                   MakePlanInPieces(model, capacity.speed, request, GranuleTokens(defaults, options, ranks)));
  RETURN_IF_ERROR(CheckKvOfPieces(model, request, choice, capacity.rank_kv_bytes * ranks));
  return choice;
}

absl::StatusOr<PlanChoice> PlanAll(const ModelShape& model, const EngineOptions& defaults,
                                   const PoolCapacity& capacity, int64_t tokens,
                                   const PrefillOptions& options) {
  if (capacity.ranks == 0) {
    return absl::UnavailableError("the pool has no workers; start some, or try again later");
  }
  RETURN_IF_ERROR(CheckShares(capacity));
  const int idle = NeedsAllRanks(capacity, options) ? 0 : std::min(kMostIdleRanks, capacity.ranks / 4);
  PlanRequest request = RequestOf(defaults, capacity, tokens, options);
  absl::StatusOr<PlanChoice> best = absl::InternalError("no plan");
  std::vector<PlanCandidate> candidates;
  for (int ranks = capacity.ranks; ranks >= capacity.ranks - idle && ranks >= 1; --ranks) {
    request.ranks = ranks;
    request.memory_budget_bytes = capacity.rank_memory_bytes * ranks;
    request.weights = WeightsOf(capacity, ranks);
    absl::StatusOr<PlanChoice> choice = MakePlan(model, capacity.speed, request);
    if (choice.ok()) {
      std::move(choice->candidates.begin(), choice->candidates.end(), std::back_inserter(candidates));
    }
    const bool first = ranks == capacity.ranks;
    const bool better =
        choice.ok() && (!best.ok() || choice->plan.predicted.seconds < best->plan.predicted.seconds);
    if (first || better) best = std::move(choice);
  }
  if (absl::IsFailedPrecondition(best.status())) {
    return PlanInPieces(model, defaults, capacity, request, capacity.ranks, options);
  }
  if (!best.ok()) return best;
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const PlanCandidate& left, const PlanCandidate& right) {
                     return left.predicted.seconds < right.predicted.seconds;
                   });
  best->candidates = std::move(candidates);
  return best;
}

PrefillOptions InStripesOf(const CachedPrefix& cached, PrefillOptions options) {
  options.stripe = cached.stripe;
  return options;
}

// Plans with the weights as the capacity has them.
absl::StatusOr<PlanChoice> PlanWithWeights(const ModelShape& model, const EngineOptions& defaults,
                                           const PoolCapacity& capacity, int64_t tokens,
                                           const PrefillOptions& options, const CachedPrefix& cached) {
  absl::StatusOr<PlanChoice> all = PlanAll(model, defaults, capacity, tokens, options);
  const int64_t cached_tokens = UsableTokensOf(cached, defaults, tokens, options);
  const bool fewer = cached.ranks < capacity.ranks && capacity.rank_weights.mode == WeightMode::kSharded;
  if (cached_tokens == 0 || cached.ranks > capacity.ranks || fewer || !CheckShares(capacity).ok()) return all;
  const PrefillOptions as_cached = InStripesOf(cached, options);
  PlanRequest request = RequestOf(defaults, capacity, tokens - cached_tokens, as_cached);
  request.layout = LayoutKind::kStriped;
  request.cached_tokens = cached_tokens;
  absl::StatusOr<PlanChoice> behind =
      PlanInPieces(model, defaults, capacity, request, cached.ranks, as_cached);
  return IsFaster(behind, all) ? behind : all;
}

// The same, and leaves room for short prompts where that is possible.
absl::StatusOr<PlanChoice> PlanHeld(const ModelShape& model, const EngineOptions& defaults,
                                    const PoolCapacity& capacity, int64_t tokens,
                                    const PrefillOptions& options, const CachedPrefix& cached) {
  return PlanBesideShort(capacity.rank_memory_bytes, capacity.short_rank_bytes,
                         [&](int64_t rank_memory_bytes) {
                           PoolCapacity within = capacity;
                           within.rank_memory_bytes = rank_memory_bytes;
                           return PlanWithWeights(model, defaults, within, tokens, options, cached);
                         });
}

}  // namespace

PlanWeights SharedWeightsOf(const PlanWeights& one, const Topology& topology,
                            const std::vector<int>& node_of_worker) {
  return SharedAmong(one, static_cast<int>(node_of_worker.size()), RingLink(topology, node_of_worker));
}

absl::Status CheckShares(const PlanWeights& one, int workers, int64_t memory_bytes_left) {
  if (one.mode != WeightMode::kSharded) return absl::OkStatus();
  if (workers == 1) {
    return absl::FailedPreconditionError(
        "model.weights is sharded, and the pool has one worker, which has nobody to share with: start more, "
        "or set resident or streamed");
  }
  if (memory_bytes_left >= 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the weights take ", one.loaded_bytes, " bytes, of which each of ", workers,
                   " workers keeps ", ShareBytes(one, workers),
                   ", more than one of them has memory for: start more workers, or set "
                   "model.weights to streamed"));
}

Topology TopologyOf(const v1::PoolSection& pool) {
  Link between = kAssumedLink;
  if (pool.has_link_bytes_per_second()) between.bytes_per_second = pool.link_bytes_per_second();
  if (pool.has_link_latency())
    between.latency_seconds = absl::ToDoubleSeconds(ToDuration(pool.link_latency()));
  Link on_host = between;
  if (pool.has_host_link_bytes_per_second()) on_host.bytes_per_second = pool.host_link_bytes_per_second();
  if (pool.has_host_link_latency())
    on_host.latency_seconds = absl::ToDoubleSeconds(ToDuration(pool.host_link_latency()));

  Topology links = {
      .same_node = on_host, .between_nodes = between, .one_flow_a_seat = !pool.has_host_bytes_per_second()};
  if (pool.host_bytes_per_second() > 0) links.node_bytes_per_second = pool.host_bytes_per_second();
  return links;
}

ConfiguredLinks ConfiguredLinksOf(const v1::PoolSection& pool) {
  ConfiguredLinks configured{.links = TopologyOf(pool)};
  if (!pool.measure_links()) return configured;
  const auto left_out = [&](LinkClass of) -> bool& { return configured.measure[static_cast<int>(of)]; };
  left_out(LinkClass::kBetweenHosts) = !pool.has_link_bytes_per_second() && !pool.has_link_latency();
  left_out(LinkClass::kOnHost) = !pool.has_host_link_bytes_per_second() && !pool.has_host_link_latency();
  left_out(LinkClass::kOutOfHost) = !pool.has_host_bytes_per_second();
  return configured;
}

int64_t UsableTokensOf(const CachedPrefix& cached, const EngineOptions& defaults, int64_t tokens,
                       const PrefillOptions& options) {
  // A rank reads its own tokens alone: another stripe would deal them otherwise.
  if (cached.tokens == 0 || options.stripe.value_or(cached.stripe) != cached.stripe) return 0;
  return UsableCachedTokens(defaults, InStripesOf(cached, options), cached.ranks, cached.tokens, tokens);
}

int64_t ShortRoomOf(const ModelShape& model, const EngineOptions& defaults, const PoolCapacity& rank) {
  PlanRequest request = RequestOf(defaults, rank, /*tokens=*/1, PrefillOptions());
  request.memory_budget_bytes = rank.rank_memory_bytes;
  request.weights = WeightsOf(rank, 1);
  return ShortRoomBytes(model, rank.speed, request);
}

bool IsFaster(const absl::StatusOr<PlanChoice>& other, const absl::StatusOr<PlanChoice>& best) {
  return other.ok() && (!best.ok() || other->plan.predicted.seconds < best->plan.predicted.seconds);
}

absl::StatusOr<PlanChoice> PlanOnFastest(
    const PoolCapacity& capacity, const PrefillOptions& options,
    const std::function<absl::StatusOr<PlanChoice>(const PoolCapacity& part)>& plan) {
  absl::StatusOr<PlanChoice> best = plan(capacity);
  // What is kept is spread over all workers where it can be: a few may have no room for it.
  const bool keeps_kv = options.kv != nullptr;
  if ((keeps_kv && best.ok()) || NeedsAllRanks(capacity, options)) return best;
  for (const PoolCapacity& part : capacity.faster_parts) {
    absl::StatusOr<PlanChoice> choice = plan(part);
    if (IsFaster(choice, best)) best = std::move(choice);
  }
  return best;
}

absl::StatusOr<PlanChoice> PlanForPool(const ModelShape& model, const EngineOptions& defaults,
                                       const PoolCapacity& capacity, int64_t tokens,
                                       const PrefillOptions& options, const CachedPrefix& cached) {
  absl::StatusOr<PlanChoice> choice = PlanHeld(model, defaults, capacity, tokens, options, cached);
  if (!capacity.shared_weights.has_value()) return choice;
  PoolCapacity sharing = capacity;
  sharing.rank_weights = *capacity.shared_weights;
  sharing.rank_memory_bytes = capacity.shared_rank_memory_bytes;
  absl::StatusOr<PlanChoice> shared = PlanHeld(model, defaults, sharing, tokens, options, cached);
  return IsFaster(shared, choice) ? shared : choice;
}

}  // namespace meshfill
