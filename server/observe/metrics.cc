#include "server/observe/metrics.h"

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/mutex.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "server/observe/metric_families.h"
#include "server/observe/metrics_text.h"

namespace meshfill {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;

constexpr const char* kWorkerStates[] = {"ready", "preparing", "running", "stopping", "draining"};

void CountBytes(const CommBytes& bytes, Family<Counter>& family) {
  for (Traffic traffic : kPrefillTraffics) {
    family.Add({{"op", TrafficName(traffic)}}).Increment(static_cast<double>(bytes[traffic]));
  }
}

// A counter that follows a count which somebody else keeps.
void RaiseTo(Counter& counter, uint64_t total) {
  counter.Increment(std::max(0.0, static_cast<double>(total) - counter.Value()));
}

void ObserveExperts(MetricFamilies& f, std::span<const ExpertLoad> by_layer) {
  ExpertLoad worst = {};
  for (const ExpertLoad& load : by_layer) {
    f.expert_imbalance.Observe(load.imbalance);
    f.expert_idle.Observe(load.idle);
    if (load.imbalance > worst.imbalance) worst = load;
  }
  f.worst_expert_imbalance.Set(worst.imbalance);
  f.worst_expert_layer.Set(worst.layer);
}

}  // namespace

const char* PoolStateName(PoolState state) {
  switch (state) {
    case PoolState::kLoading:
      return "loading";
    case PoolState::kReady:
      return "ready";
    case PoolState::kDraining:
      return "draining";
  }
  return "?";
}

const char* RefusalName(Refusal refusal) {
  switch (refusal) {
    case Refusal::kInvalid:
      return "invalid";
    case Refusal::kUnknownModel:
      return "unknown_model";
    case Refusal::kTooLong:
      return "too_long";
    case Refusal::kPoolTooSmall:
      return "pool_too_small";
    case Refusal::kDuplicate:
      return "duplicate";
    case Refusal::kQueueRequests:
      return "queue_requests";
    case Refusal::kQueueTokens:
      return "queue_tokens";
    case Refusal::kQueueWait:
      return "queue_wait";
    case Refusal::kTenantShare:
      return "tenant_share";
    case Refusal::kDeadline:
      return "deadline";
    case Refusal::kKvRoom:
      return "kv_room";
    case Refusal::kMemory:
      return "memory";
    case Refusal::kCredentials:
      return "credentials";
    case Refusal::kNotReady:
      return "not_ready";
    case Refusal::kOther:
      return "other";
  }
  return "?";
}

Metrics::Metrics() : families_(std::make_unique<MetricFamilies>()) {}

Metrics::~Metrics() = default;

std::string Metrics::Text(MetricsFormat format) const {
  return MetricsText(families_->Collect(), format, {{"meshfill_ttft_seconds", families_->TtftExemplars()}});
}

void Metrics::SetPool(PoolState state, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) families_->AddRank(rank);
  for (PoolState each : kPoolStates) {
    families_->ranks.Add({{"state", PoolStateName(each)}}).Set(each == state ? ranks : 0);
  }
}

void Metrics::SetWorkers(const PoolLoad& load) {
  MetricFamilies& f = *families_;
  int total = 0;
  for (const char* state : kWorkerStates) {
    const auto found = load.ranks_by_state.find(state);
    const int ranks = found == load.ranks_by_state.end() ? 0 : found->second;
    f.ranks.Add({{"state", state}}).Set(ranks);
    total += ranks;
  }
  for (int rank = 0; rank < total; ++rank) f.AddRank(rank);
  RaiseTo(f.epochs, load.epochs);
  RaiseTo(f.worker_joins, load.joins);
  RaiseTo(f.worker_losses, load.losses);
  RaiseTo(f.worker_refusals, load.refusals);
  RaiseTo(f.retries, load.retries);
}

void Metrics::SetKv(const KvLoad& load) {
  MetricFamilies& f = *families_;
  f.kv_leases.Set(static_cast<double>(load.leases));
  f.kv_bytes.Set(static_cast<double>(load.bytes));
  f.kv_max_bytes.Set(static_cast<double>(load.max_bytes));
  RaiseTo(f.kv_lapsed, load.lapsed);
  RaiseTo(f.kv_refused, load.refused);
  f.kv_cached_bytes.Set(static_cast<double>(load.cached_bytes));
  f.kv_device_bytes.Set(static_cast<double>(load.device_bytes));
  RaiseTo(f.kv_hit_tokens, load.hit_tokens);
  RaiseTo(f.kv_miss_tokens, load.miss_tokens);
  RaiseTo(f.kv_evictions, load.evictions);
  RaiseTo(f.kv_evicted_bytes, load.evicted_bytes);
}

void Metrics::SetKvOfWorkers(const std::map<std::string, KvLoad>& by_name) {
  MetricFamilies& f = *families_;
  const MutexLock lock(f.mu);
  const std::array<Family<Gauge>*, 3> families = {&f.kv_worker_leases, &f.kv_worker_bytes,
                                                  &f.kv_worker_max_bytes};
  std::erase_if(f.kv_of_workers, [&](const auto& entry) {
    if (by_name.contains(entry.first)) return false;
    for (size_t i = 0; i < families.size(); ++i) families[i]->Remove(entry.second[i]);
    return true;
  });
  for (const auto& [name, load] : by_name) {
    std::array<Gauge*, 3>& gauges = f.kv_of_workers[name];
    const std::array<int64_t, 3> values = {load.leases, load.bytes, load.max_bytes};
    for (size_t i = 0; i < families.size(); ++i) {
      if (gauges[i] == nullptr) gauges[i] = &families[i]->Add({{"worker", name}});
      gauges[i]->Set(static_cast<double>(values[i]));
    }
  }
}

void Metrics::OnKvFetched(int64_t bytes) {
  families_->kv_fetched_bytes.Increment(static_cast<double>(bytes));
}

void Metrics::SetPeakFlops(double flops_per_second) { families_->peak_flops.Set(flops_per_second); }

void Metrics::SetQueueLimits(int64_t max_requests, int64_t max_tokens, absl::Duration max_wait) {
  families_->queue_max_requests.Set(static_cast<double>(max_requests));
  families_->queue_max_tokens.Set(static_cast<double>(max_tokens));
  families_->queue_max_wait.Set(absl::ToDoubleSeconds(max_wait));
}

void Metrics::SetQueue(const QueueLoad& load) {
  families_->queue_requests.Set(static_cast<double>(load.requests));
  families_->queue_tokens.Set(static_cast<double>(load.tokens));
  families_->running_tokens.Set(static_cast<double>(load.running_tokens));
  for (size_t i = 0; i < load.requests_by_class.size(); ++i) {
    families_->queue_class_requests[i]->Set(static_cast<double>(load.requests_by_class[i]));
  }
  const MutexLock lock(families_->mu);
  for (const auto& [tenant, requests] : load.requests_by_tenant) {
    Gauge*& gauge = families_->queue_of_tenants[tenant];
    if (gauge == nullptr) gauge = &families_->queue_tenants.Add({{"tenant", tenant}});
    gauge->Set(static_cast<double>(requests));
  }
  families_->oldest_in_queue = load.oldest;
}

void Metrics::OnPrefillStart(double queue_seconds) { families_->queue_wait.Observe(queue_seconds); }

void Metrics::SetTraceSpans(const SpanExporter::Counts& counts) {
  RaiseTo(families_->exported_spans, counts.exported);
  RaiseTo(families_->dropped_spans, counts.dropped);
}
void Metrics::OnPreempted() { families_->preemptions.Increment(); }

void Metrics::OnComputed(double seconds, bool others) {
  (others ? families_->computing_beside_others : families_->computing_alone).Increment(seconds);
}

void Metrics::OnPrefillDone(const PrefillResult& result) {
  MetricFamilies& f = *families_;
  ObserveExperts(f, result.expert_loads);
  f.paused.Increment(result.paused_seconds);
  if (result.pack_prompts > 1) f.packed.Increment();
  f.prefill.Observe(result.prefill_seconds);
  f.prompt_tokens.Increment(static_cast<double>(result.tokens()));
  f.mfu.Set(result.mfu);
  f.attention_mfu.Set(result.attention_mfu);
  f.predicted.Set(result.plan.predicted.seconds);
  f.predicted_peak_bytes.Set(static_cast<double>(result.plan.predicted.peak_bytes));
  f.predicted_total.Increment(result.plan.predicted.seconds);
  CountBytes(result.comm_bytes, f.rank_comm_bytes);
  CountBytes(result.plan.predicted.comm_bytes, f.predicted_comm_bytes);
  if (result.plan.predicted.seconds > 0) {
    f.prediction_ratio.Set(result.prefill_seconds / result.plan.predicted.seconds);
  }

  const auto busy_seconds = [](const RankStats& stats) {
    return stats.total_seconds - stats.comm_wait_seconds();
  };
  double all_busy = 0;
  for (const RankStats& stats : result.ranks) all_busy += busy_seconds(stats);
  double attention_seconds = 0, wait_seconds = 0, busiest = 0, least_busy = 0;
  for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
    const RankStats& stats = result.ranks[rank];
    const std::string label =
        std::to_string(result.pool_ranks.empty() ? static_cast<int>(rank) : result.pool_ranks[rank]);
    for (Traffic traffic : kPrefillTraffics) {
      f.comm_wait.Add({{"rank", label}, {"op", OperationName(traffic)}})
          .Increment(stats.wait_seconds[traffic]);
    }
    f.attention_compute.Add({{"rank", label}}).Increment(stats.block_seconds + stats.merge_seconds);
    f.attention.Add({{"rank", label}}).Increment(stats.attention_seconds);
    CountBytes(stats.sent, f.comm_bytes);
    attention_seconds += stats.attention_seconds;
    wait_seconds += stats.comm_wait_seconds();
    const double busy = busy_seconds(stats);
    f.busy.Add({{"rank", label}}).Increment(busy);
    // Ranks of a pass of several prompts have more or fewer of them.
    const double mean_busy =
        result.pack_prompts > 1 ? busy : all_busy / static_cast<double>(result.ranks.size());
    f.mesh_busy.Add({{"rank", label}}).Increment(mean_busy);
    busiest = rank == 0 ? busy : std::max(busiest, busy);
    least_busy = rank == 0 ? busy : std::min(least_busy, busy);
  }
  f.overlap.Set(attention_seconds > 0 ? 1 - wait_seconds / attention_seconds : 1);
  if (result.pack_prompts == 1) f.straggler_spread.Set(busiest - least_busy);  // of others it had a share

  const prometheus::Labels labels = {{"ranks", std::to_string(result.plan.ranks())},
                                     {"heads", std::to_string(result.plan.heads)},
                                     {"a", std::to_string(result.plan.tile.a)},
                                     {"b", std::to_string(result.plan.tile.b)},
                                     {"layout", LayoutName(result.plan.layout.kind())},
                                     {"stripe", std::to_string(result.plan.layout.stripe())}};
  const MutexLock lock(f.mu);
  Gauge& gauge = f.plan_info.Add(labels);  // the one that is there, where the plan is the same
  if (&gauge == f.plan_gauge) return;
  gauge.Set(1);
  if (f.plan_gauge != nullptr) f.plan_info.Remove(f.plan_gauge);
  f.plan_gauge = &gauge;
}

void Metrics::OnRequestDone(absl::StatusCode code) {
  families_->requests.Add({{"code", absl::StatusCodeToString(code)}}).Increment();
}

void Metrics::OnRequestRefused(Refusal refusal) {
  families_->refusals.Add({{"reason", RefusalName(refusal)}}).Increment();
}

void Metrics::OnResultDropped() { families_->dropped_results.Increment(); }

void Metrics::OnCallRefused(const char* call, absl::StatusCode code) {
  families_->call_refusals.Add({{"call", call}, {"code", absl::StatusCodeToString(code)}}).Increment();
}

void Metrics::OnFirstToken(const FirstToken& first) {
  MetricFamilies& f = *families_;
  f.ttft.Observe(first.seconds);
  f.upload.Observe(first.upload_seconds);
  f.TtftOfPrompt(first.prompt_tokens).Observe(first.seconds);
  f.SlowdownOfPrompt(first.prompt_tokens).Observe(first.slowdown);
  f.request_tokens.Observe(static_cast<double>(first.prompt_tokens));
  if (first.trace_id.empty()) return;
  const MutexLock lock(f.mu);
  f.ttft_exemplars[MetricFamilies::TtftBucket(first.seconds)] = {
      .trace_id = first.trace_id, .value = first.seconds, .at = absl::Now()};
}

}  // namespace meshfill
