#include "server/observe/metrics.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "server/observe/build_name.h"
#include "server/observe/metrics_text.h"
#include "server/observe/process_metrics.h"

namespace meshfill {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr const char* kWorkerStates[] = {"ready", "preparing", "running", "stopping", "draining"};
constexpr PoolState kPoolStates[] = {PoolState::kLoading, PoolState::kReady, PoolState::kDraining};
constexpr const char* kCallsButPrefill[] = {"FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"};
// Refusals of these calls that have a series from the start; others have one once they happen.
constexpr absl::StatusCode kUsualRefusals[] = {
    absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound, absl::StatusCode::kUnauthenticated,
    absl::StatusCode::kPermissionDenied};
constexpr int kStatusCodes = 17;  // gRPC's codes, OK (0) to UNAUTHENTICATED (16)

const Histogram::BucketBoundaries kWaitBuckets = {0.001, 0.01, 0.1,  0.5,  1,     2.5,  5,    10,
                                                  30,    60,   120,  300,  600,   900,  1200, 1800,
                                                  2400,  3600, 5400, 7200, 10800, 14400};
// Long prompts take minutes, and may wait an hour (queue.max_wait) before: the last bucket is four hours.
const Histogram::BucketBoundaries kPrefillBuckets = {0.1,  0.25, 0.5,  1,    2.5,   5,    10,   20,
                                                     30,   60,   120,  300,  600,   900,  1200, 1800,
                                                     2400, 3600, 5400, 7200, 10800, 14400};
const Histogram::BucketBoundaries kPromptBuckets = {256,    1024,    4096,    16384,   65536,
                                                    262144, 1048576, 4194304, 16777216};
const Histogram::BucketBoundaries kSlowdownBuckets = {1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000};
// At most experts / used: 16 of Qwen3-MoE, 20 of GLM-4.6, 32 of MiniMax-M2 and gpt-oss-120b.
const Histogram::BucketBoundaries kImbalanceBuckets = {1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 24, 32};
const Histogram::BucketBoundaries kIdleBuckets = {0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9};
// Classes of prompts by length: each has those that are longer than the class before.
constexpr std::array<int64_t, 3> kPromptClasses = {8192, 65536, 524288};  // and what is longer

std::string PromptClass(int64_t tokens) {
  const auto found = std::lower_bound(kPromptClasses.begin(), kPromptClasses.end(), tokens);
  return found == kPromptClasses.end() ? "+Inf" : std::to_string(*found);
}

Family<Counter>& AddCounter(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
Family<Gauge>& AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
Histogram& AddHistogram(prometheus::Registry& registry, const char* name, const char* help,
                        const Histogram::BucketBoundaries& buckets) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, buckets);
}

void CountBytes(const CommBytes& bytes, Family<Counter>& family) {
  for (Traffic traffic : kPrefillTraffics) {
    family.Add({{"op", TrafficName(traffic)}}).Increment(static_cast<double>(bytes[traffic]));
  }
}

// A counter that follows a count which somebody else keeps.
void RaiseTo(Counter& counter, uint64_t total) {
  counter.Increment(std::max(0.0, static_cast<double>(total) - counter.Value()));
}

double PeakResidentBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
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

// Every family of the registry, named once.
class Metrics::Families {
 public:
  // Measures what is only known when asked, too.
  std::vector<prometheus::MetricFamily> Collect() {
    peak_memory_bytes.Set(PeakResidentBytes());
    queue_oldest.Set(std::max(0.0, absl::ToDoubleSeconds(MonotonicNow() - OldestInQueue())));
    std::vector<prometheus::MetricFamily> families = registry.Collect();
    std::ranges::move(CollectProcessMetrics(), std::back_inserter(families));
    return families;
  }

  BucketExemplars TtftExemplars() const {
    const MutexLock lock(mu);
    return ttft_exemplars;
  }

  // A rank's counters, at 0 until its first prefill: a rate needs a sample before it.
  void AddRank(int rank) {
    const std::string label = std::to_string(rank);
    for (Family<Counter>* family : {&attention, &attention_compute, &busy}) family->Add({{"rank", label}});
    for (Traffic traffic : kPrefillTraffics) {
      comm_wait.Add({{"rank", label}, {"op", OperationName(traffic)}});
    }
  }

  void ObserveExperts(std::span<const ExpertLoad> by_layer) {
    ExpertLoad worst = {};
    for (const ExpertLoad& load : by_layer) {
      expert_imbalance.Observe(load.imbalance);
      expert_idle.Observe(load.idle);
      if (load.imbalance > worst.imbalance) worst = load;
    }
    worst_expert_imbalance.Set(worst.imbalance);
    worst_expert_layer.Set(worst.layer);
  }

  prometheus::Registry registry;

  Family<Counter>& requests =
      AddCounter(registry, "meshfill_requests_total", "Prefill requests that ended, by gRPC status code.");
  Family<Counter>& refusals = AddCounter(registry, "meshfill_requests_refused_total",
                                         "Of the ended requests, those that had no place, by reason.");
  Counter& dropped_results =
      AddCounter(registry, "meshfill_results_dropped_total",
                 "Results that their clients did not read in time, or that gave way to newer ones.")
          .Add({});
  Family<Counter>& call_refusals =
      AddCounter(registry, "meshfill_calls_refused_total",
                 "Calls other than Prefill that were refused, by call and status.");
  Family<Counter>& trace_spans = AddCounter(
      registry, "meshfill_trace_spans_total",
      "Spans that the collector at trace.endpoint has taken (exported), and that got lost (dropped).");
  Counter& exported_spans = trace_spans.Add({{"result", "exported"}});
  Counter& dropped_spans = trace_spans.Add({{"result", "dropped"}});
  Gauge& queue_requests =
      AddGauge(registry, "meshfill_queue_requests", "Requests that wait or upload; what runs is not counted.")
          .Add({});
  std::array<Gauge*, std::tuple_size_v<decltype(QueueLoad::requests_by_class)>> queue_class_requests;
  Gauge& queue_tokens = AddGauge(registry, "meshfill_queue_tokens",
                                 "Prompt tokens that wait, and that uploads count. Scale on this.")
                            .Add({});
  Gauge& queue_oldest =
      AddGauge(registry, "meshfill_queue_oldest_seconds",
               "How long the oldest request has waited since its upload was complete; 0: none waits.")
          .Add({});
  Gauge& queue_max_tokens =
      AddGauge(registry, "meshfill_queue_max_tokens", "The queue's bound in tokens (queue.max_tokens).")
          .Add({});
  Gauge& queue_max_wait = AddGauge(registry, "meshfill_queue_max_wait_seconds",
                                   "The queue's bound on the predicted wait (queue.max_wait).")
                              .Add({});
  Gauge& running_tokens =
      AddGauge(registry, "meshfill_running_tokens", "Prompt tokens of the prefills that have begun; 0: idle.")
          .Add({});
  Histogram& queue_wait = AddHistogram(registry, "meshfill_queue_wait_seconds",
                                       "From a complete upload to the prefill's begin.", kWaitBuckets);
  Histogram& ttft =
      AddHistogram(registry, "meshfill_ttft_seconds",
                   "Time to first token: from a request's begin to its result.", kPrefillBuckets);
  Histogram& upload =
      AddHistogram(registry, "meshfill_upload_seconds",
                   "From a request's begin to its complete upload, of answers.", kWaitBuckets);
  Family<Histogram>& ttft_by_prompt = prometheus::BuildHistogram()
                                          .Name("meshfill_ttft_by_prompt_seconds")
                                          .Help(
                                              "Time to first token by the prompt's length: longer than the "
                                              "class before, up to so many tokens.")
                                          .Register(registry);
  Family<Histogram>& slowdown = prometheus::BuildHistogram()
                                    .Name("meshfill_slowdown")
                                    .Help(
                                        "From the complete upload to the result, over the prefill's own "
                                        "seconds, by the prompt's length: "
                                        "longer than the class before, up to so many tokens.")
                                    .Register(registry);
  Histogram& request_tokens = AddHistogram(registry, "meshfill_request_prompt_tokens",
                                           "Tokens of the prompts of finished prefills.", kPromptBuckets);
  Histogram& prefill =
      AddHistogram(registry, "meshfill_prefill_seconds", "Wall time of finished prefills.", kPrefillBuckets);
  Counter& preemptions = AddCounter(registry, "meshfill_preemptions_total",
                                    "Times that a prefill gave way to another and stood still.")
                             .Add({});
  Counter& packed = AddCounter(registry, "meshfill_packed_prefills_total",
                               "Finished prefills that shared their pass over the weights with others.")
                        .Add({});
  Counter& paused = AddCounter(registry, "meshfill_paused_seconds_total",
                               "Time that finished prefills stood still for others.")
                        .Add({});
  std::array<Counter*, 2> computing;  // alone, and while others waited
  Counter& prompt_tokens =
      AddCounter(registry, "meshfill_prompt_tokens_total", "Prompt tokens of finished prefills.").Add({});
  Family<Counter>& comm_wait = AddCounter(
      registry, "meshfill_comm_wait_seconds_total",
      "Exposed communication: time in which a rank stood still for a chunk, by rank and operation.");
  Family<Counter>& attention_compute =
      AddCounter(registry, "meshfill_attention_compute_seconds_total",
                 "Time in which a rank computed attention blocks and merged partial outputs, by rank.");
  Family<Counter>& attention = AddCounter(
      registry, "meshfill_attention_seconds_total",
      "Wall time of a rank's attention, by rank: compute, comm wait, and what is left of it, idle.");
  Family<Counter>& busy = AddCounter(registry, "meshfill_rank_busy_seconds_total",
                                     "Wall time of a rank's prefills less its comm wait, by rank.");
  Family<Counter>& comm_bytes = AddCounter(registry, "meshfill_comm_bytes_total",
                                           "Bytes that all ranks sent to each other, by what they carried.");
  Family<Counter>& rank_comm_bytes =
      AddCounter(registry, "meshfill_largest_rank_comm_bytes_total",
                 "Bytes sent by the rank that sent most in each prefill, by what they carried.");
  Family<Counter>& predicted_comm_bytes =
      AddCounter(registry, "meshfill_predicted_comm_bytes_total",
                 "What the plan's formula says the rank that sends most sends, by what it carries.");
  Gauge& overlap = AddGauge(registry, "meshfill_overlap_ratio",
                            "Of the last prefill: share of the ranks' attention time that did not wait for "
                            "communication (1: all hidden).")
                       .Add({});
  Gauge& mfu = AddGauge(registry, "meshfill_mfu",
                        "Of the last prefill: model FLOPs done / (seconds x sum of the ranks' peak FLOP/s).")
                   .Add({});
  Gauge& attention_mfu = AddGauge(registry, "meshfill_attention_mfu",
                                  "Of the last prefill: MFU within attention, unmasked pairs only.")
                             .Add({});
  Gauge& predicted =
      AddGauge(registry, "meshfill_predicted_seconds", "Of the last prefill: the plan's prediction.").Add({});
  Counter& predicted_total = AddCounter(registry, "meshfill_predicted_prefill_seconds_total",
                                        "What the plans predicted for all finished prefills, to be held "
                                        "against meshfill_prefill_seconds_sum.")
                                 .Add({});
  Gauge& prediction_ratio =
      AddGauge(registry, "meshfill_prediction_ratio",
               "Of the last prefill: real seconds / predicted seconds (above 1: slower than predicted).")
          .Add({});
  Gauge& straggler_spread = AddGauge(registry, "meshfill_straggler_spread_seconds",
                                     "Of the last prefill: busy time of the busiest rank less that of the "
                                     "least busy one, waits not counted.")
                                .Add({});
  Histogram& expert_imbalance =
      AddHistogram(registry, "meshfill_expert_imbalance",
                   "Of each layer with experts of finished prefills: tokens of its busiest expert over the "
                   "mean of all its experts (1: even).",
                   kImbalanceBuckets);
  Histogram& expert_idle =
      AddHistogram(registry, "meshfill_expert_idle_ratio",
                   "Of each layer with experts of finished prefills: share of its experts to which no token "
                   "went.",
                   kIdleBuckets);
  Gauge& worst_expert_imbalance =
      AddGauge(registry, "meshfill_expert_worst_imbalance",
               "Of the last prefill: the largest imbalance of a layer's experts; 0: no layer has experts.")
          .Add({});
  Gauge& worst_expert_layer =
      AddGauge(registry, "meshfill_expert_worst_layer",
               "Of the last prefill: the layer that meshfill_expert_worst_imbalance is of, from 0.")
          .Add({});
  Gauge& peak_flops = AddGauge(registry, "meshfill_peak_flops_per_second",
                               "Peak FLOP/s of all ranks together, to which MFU refers; 0: not known yet.")
                          .Add({});
  Gauge& peak_memory_bytes =
      AddGauge(registry, "meshfill_peak_memory_bytes", "Largest resident memory of this process so far.")
          .Add({});
  Gauge& predicted_peak_bytes =
      AddGauge(registry, "meshfill_predicted_peak_bytes",
               "Of the last prefill: what the plan predicted for the activations of a process's ranks.")
          .Add({});
  Counter& epochs =
      AddCounter(registry, "meshfill_epochs_total",
                 "Memberships of the pool that ran requests: a worker that joins, leaves or is lost "
                 "begins a new one.")
          .Add({});
  Counter& worker_joins = AddCounter(registry, "meshfill_worker_joins_total", "Workers that joined.").Add({});
  Counter& worker_losses =
      AddCounter(registry, "meshfill_worker_losses_total",
                 "Workers that were lost: dead, cut off, silent or hung. Those that drained are not counted.")
          .Add({});
  Counter& worker_refusals =
      AddCounter(registry, "meshfill_worker_refusals_total",
                 "Workers that were refused: another model or version, a name that is taken.")
          .Add({});
  Counter& retries = AddCounter(registry, "meshfill_requests_retried_total",
                                "Runs begun again for a request whose epoch ended.")
                         .Add({});
  Gauge& kv_leases = AddGauge(registry, "meshfill_kv_leases",
                              "Leases on kept K and V, those of unfinished prefills included.")
                         .Add({});
  Gauge& kv_bytes =
      AddGauge(registry, "meshfill_kv_bytes",
               "Bytes of K and V that are kept; those for a lease are charged before they are computed.")
          .Add({});
  Gauge& kv_max_bytes =
      AddGauge(registry, "meshfill_kv_max_bytes", "The bound on kept K and V (kv.memory_bytes).").Add({});
  Counter& kv_fetched_bytes =
      AddCounter(registry, "meshfill_kv_fetched_bytes_total", "Bytes of K and V that clients fetched.")
          .Add({});
  Counter& kv_lapsed =
      AddCounter(registry, "meshfill_kv_leases_lapsed_total", "Leases that ended by their time.").Add({});
  Counter& kv_refused =
      AddCounter(registry, "meshfill_kv_refused_total", "Requests refused because their K and V had no room.")
          .Add({});
  Gauge& kv_cached_bytes = AddGauge(registry, "meshfill_kv_cached_bytes",
                                    "Of the kept bytes, those that later prompts may begin with.")
                               .Add({});
  Gauge& kv_device_bytes = AddGauge(registry, "meshfill_kv_device_bytes",
                                    "Of the kept bytes, those that are in the memory of GPUs.")
                               .Add({});
  Counter& kv_hit_tokens = AddCounter(registry, "meshfill_kv_cache_hit_tokens_total",
                                      "Tokens of prompts that came from a cached prefix.")
                               .Add({});
  Counter& kv_miss_tokens = AddCounter(registry, "meshfill_kv_cache_miss_tokens_total",
                                       "Tokens of prompts that were looked up and computed.")
                                .Add({});
  Counter& kv_evictions =
      AddCounter(registry, "meshfill_kv_cache_evictions_total", "Cached prompts that made room for others.")
          .Add({});
  Counter& kv_evicted_bytes =
      AddCounter(registry, "meshfill_kv_cache_evicted_bytes_total", "Bytes of K and V that were free then.")
          .Add({});
  Family<Gauge>& kv_worker_leases =
      AddGauge(registry, "meshfill_kv_worker_leases",
               "Leases of whose K and V a worker holds a part, or is to hold one, by worker.");
  Family<Gauge>& kv_worker_bytes =
      AddGauge(registry, "meshfill_kv_worker_bytes", "Bytes of K and V charged to a worker, by worker.");
  Family<Gauge>& kv_worker_max_bytes =
      AddGauge(registry, "meshfill_kv_worker_max_bytes", "The bound on what a worker keeps, by worker.");
  Family<Gauge>& ranks = AddGauge(registry, "meshfill_ranks", "Ranks of the pool, by state.");
  Family<Gauge>& plan_info =
      AddGauge(registry, "meshfill_plan_info", "1, with the plan of the last prefill as labels.");

  mutable Mutex mu;  // guards what follows
  absl::Time oldest_in_queue = absl::InfiniteFuture();
  Gauge* plan_gauge = nullptr;
  std::map<std::string, std::array<Gauge*, 3>> kv_of_workers;  // by name: leases, bytes and their bound
  BucketExemplars ttft_exemplars;

 private:
  absl::Time OldestInQueue() const {
    const MutexLock lock(mu);
    return oldest_in_queue;
  }
};

Metrics::Metrics() : families_(std::make_unique<Families>()) {
  Families& f = *families_;
  const auto add_class = [&](int64_t tokens) {
    f.ttft_by_prompt.Add({{"up_to", PromptClass(tokens)}}, kPrefillBuckets);
    f.slowdown.Add({{"up_to", PromptClass(tokens)}}, kSlowdownBuckets);
  };
  for (const int64_t tokens : kPromptClasses) add_class(tokens);
  add_class(kPromptClasses.back() + 1);
  Family<Gauge>& queue_class_requests = AddGauge(f.registry, "meshfill_queue_class_requests",
                                                 "Requests that wait or upload, by priority class.");
  const int top = static_cast<int>(f.queue_class_requests.size()) / 2;
  for (int priority = -top; priority <= top; ++priority) {
    f.queue_class_requests[priority + top] = &queue_class_requests.Add({{"class", std::to_string(priority)}});
  }
  Family<Counter>& computing =
      AddCounter(f.registry, "meshfill_computing_seconds_total",
                 "Time in which a prefill computed; others: whether others waited or stood still then.");
  f.computing = {&computing.Add({{"others", "no"}}), &computing.Add({{"others", "yes"}})};
  AddGauge(f.registry, "meshfill_build_info", "1, with the build as labels.")
      .Add({{"version", MESHFILL_VERSION}, {"commit", kBuildCommit}})
      .Set(1);
  for (int code = 0; code < kStatusCodes; ++code) {
    f.requests.Add({{"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
  }
  for (int reason = 0; reason <= static_cast<int>(Refusal::kOther); ++reason) {
    f.refusals.Add({{"reason", RefusalName(static_cast<Refusal>(reason))}});
  }
  for (const char* call : kCallsButPrefill) {
    for (absl::StatusCode code : kUsualRefusals) {
      f.call_refusals.Add({{"call", call}, {"code", absl::StatusCodeToString(code)}});
    }
  }
  for (Traffic traffic : kPrefillTraffics) {
    for (Family<Counter>* family : {&f.comm_bytes, &f.rank_comm_bytes, &f.predicted_comm_bytes}) {
      family->Add({{"op", TrafficName(traffic)}});
    }
  }
  for (PoolState state : kPoolStates) f.ranks.Add({{"state", PoolStateName(state)}});
}

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
  Families& f = *families_;
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
  Families& f = *families_;
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
  Families& f = *families_;
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

void Metrics::SetQueueLimits(int64_t max_tokens, absl::Duration max_wait) {
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
  families_->oldest_in_queue = load.oldest;
}

void Metrics::OnPrefillStart(double queue_seconds) { families_->queue_wait.Observe(queue_seconds); }

void Metrics::SetTraceSpans(const SpanExporter::Counts& counts) {
  RaiseTo(families_->exported_spans, counts.exported);
  RaiseTo(families_->dropped_spans, counts.dropped);
}
void Metrics::OnPreempted() { families_->preemptions.Increment(); }

void Metrics::OnComputed(double seconds, bool others) {
  families_->computing[others ? 1 : 0]->Increment(seconds);
}

void Metrics::OnPrefillDone(const PrefillResult& result) {
  Families& f = *families_;
  f.ObserveExperts(result.expert_loads);
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

  double attention_seconds = 0, wait_seconds = 0, busiest = 0, least_busy = 0;
  for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
    const RankStats& stats = result.ranks[rank];
    const std::string label = std::to_string(rank);
    for (Traffic traffic : kPrefillTraffics) {
      f.comm_wait.Add({{"rank", label}, {"op", OperationName(traffic)}})
          .Increment(stats.wait_seconds[traffic]);
    }
    f.attention_compute.Add({{"rank", label}}).Increment(stats.block_seconds + stats.merge_seconds);
    f.attention.Add({{"rank", label}}).Increment(stats.attention_seconds);
    CountBytes(stats.sent, f.comm_bytes);
    attention_seconds += stats.attention_seconds;
    wait_seconds += stats.comm_wait_seconds();
    const double busy = stats.total_seconds - stats.comm_wait_seconds();
    f.busy.Add({{"rank", label}}).Increment(busy);
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
  Families& f = *families_;
  const std::string up_to = PromptClass(first.prompt_tokens);
  f.ttft.Observe(first.seconds);
  f.upload.Observe(first.upload_seconds);
  f.ttft_by_prompt.Add({{"up_to", up_to}}, kPrefillBuckets).Observe(first.seconds);
  f.slowdown.Add({{"up_to", up_to}}, kSlowdownBuckets).Observe(first.slowdown);
  f.request_tokens.Observe(static_cast<double>(first.prompt_tokens));
  if (first.trace_id.empty()) return;
  const auto bucket = std::lower_bound(kPrefillBuckets.begin(), kPrefillBuckets.end(), first.seconds);
  const double bound = bucket == kPrefillBuckets.end() ? std::numeric_limits<double>::infinity() : *bucket;
  const MutexLock lock(f.mu);
  f.ttft_exemplars[bound] = {.trace_id = first.trace_id, .value = first.seconds, .at = absl::Now()};
}

}  // namespace meshfill
