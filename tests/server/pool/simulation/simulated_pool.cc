#include "tests/server/pool/simulation/simulated_pool.h"

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "engine/engine_options.h"
#include "server/pool/offered_speed.h"

namespace meshfill {
namespace {

constexpr int64_t kStripe = 2;

}  // namespace

v1::ModelId SimulatedModel() {
  v1::ModelId model;
  model.set_name("simulated");
  model.set_config_hash(7);
  model.set_weights_hash(8);
  model.set_dtype("f32");
  return model;
}

v1::Speed SimulatedSpeed() {
  return ToProto(PoolSpeed{
      .gemm_flops_per_second = 1e9, .attention_flops_per_second = 1e9, .merge_bytes_per_second = 1e9});
}

const ModelShape& SimulatedShape() {
  static const ModelShape shape{.layers = 3,
                                .hidden = 64,
                                .intermediate = 128,
                                .q_heads = 4,
                                .kv_heads = 2,
                                .head_dim = 16,
                                .vocab = 4,
                                .context_tokens = 1 << 20};
  return shape;
}

absl::StatusOr<PlanChoice> RememberedPlan(const PoolCapacity& capacity, int64_t tokens,
                                          const PrefillOptions& options, const CachedPrefix& cached) {
  EngineOptions defaults;
  defaults.stripe = kStripe;
  const int64_t cached_tokens = UsableTokensOf(cached, defaults, tokens, options);
  const PlanWeights shared = capacity.shared_weights.value_or(PlanWeights());
  using Key =
      std::tuple<int64_t, int64_t, int, bool, bool, std::vector<int>, int64_t, double, double, double, double,
                 double, WeightMode, double, int64_t, int64_t, std::vector<int>, bool, int64_t>;
  static std::mutex mutex;
  static std::map<Key, absl::StatusOr<PlanChoice>> plans;
  const std::lock_guard<std::mutex> lock(mutex);
  const Topology& links = capacity.topology;
  auto [entry, fresh] = plans.try_emplace(
      Key{tokens, cached_tokens, cached_tokens == 0 ? 0 : cached.ranks,
          capacity.rank_kv_bytes * capacity.ranks < tokens * kTokenBytes,
          capacity.rank_kv_bytes * cached.ranks < tokens * kTokenBytes, links.node_of_seat,
          capacity.rank_memory_bytes, links.same_node.bytes_per_second, links.same_node.latency_seconds,
          links.between_nodes.bytes_per_second, links.between_nodes.latency_seconds,
          links.node_bytes_per_second, capacity.rank_weights.mode, capacity.rank_weights.layer_seconds,
          shared.loaded_bytes, capacity.shared_rank_memory_bytes,
          shared.loaded_bytes == 0 ? std::vector<int>() : capacity.first_seats, capacity.many_messages,
          capacity.short_rank_bytes},
      absl::UnknownError("not planned"));
  if (fresh) entry->second = PlanForPool(SimulatedShape(), defaults, capacity, tokens, options, cached);
  return entry->second;
}

int64_t SmallRankBytes(int ranks) {
  static std::mutex mutex;
  static std::map<int, int64_t> bytes_of_rank;
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t& bytes = bytes_of_rank[ranks];
  EngineOptions defaults;
  defaults.stripe = kStripe;
  PoolCapacity capacity = {.ranks = ranks, .rank_kv_bytes = kLongestPrompt * kTokenBytes};
  const auto whole = PlanForPool(SimulatedShape(), defaults, capacity, kLongestPrompt, {});
  for (int percent = 50; bytes == 0; percent += 5) {
    capacity.rank_memory_bytes = whole->plan.predicted.run_bytes * percent / 100 / ranks + 1;
    const auto choice = PlanForPool(SimulatedShape(), defaults, capacity, kLongestPrompt, {});
    if (choice.ok() && choice->pieces.size() <= 6) bytes = capacity.rank_memory_bytes;
  }
  return bytes;
}

int64_t MostRunBytes() {
  static const int64_t bytes = [] {
    EngineOptions defaults;
    defaults.stripe = kStripe;
    return PlanForPool(SimulatedShape(), defaults, {.ranks = 1}, kLongestPrompt, {})
        .value()
        .plan.predicted.run_bytes;
  }();
  return bytes;
}

}  // namespace meshfill
