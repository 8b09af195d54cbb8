// Every metric family of the server: its name, its help text and its buckets (docs/metrics.md), named once.
// What changes their values is in metrics.cc.
//
// Prometheus' families are thread-safe; what is guarded by the mutex says so.
#ifndef MESHFILL_SERVER_OBSERVE_METRIC_FAMILIES_H_
#define MESHFILL_SERVER_OBSERVE_METRIC_FAMILIES_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "server/observe/metrics.h"
#include "server/observe/metrics_text.h"

namespace meshfill {

class MetricFamilies {
 public:
  template <typename T>
  using Family = prometheus::Family<T>;
  using Counter = prometheus::Counter;
  using Gauge = prometheus::Gauge;
  using Histogram = prometheus::Histogram;

  // Series whose labels are known are there from the start, at 0: a rate needs a sample before its first.
  MetricFamilies();

  // Measures what is only known when asked, too.
  std::vector<prometheus::MetricFamily> Collect();

  // A rank's counters, at 0 until its first prefill.
  void AddRank(int rank);
  // Those of the class of prompts by length that so many tokens fall into.
  Histogram& TtftOfPrompt(int64_t tokens);
  Histogram& SlowdownOfPrompt(int64_t tokens);
  // The upper bound of the bucket of TTFT that so many seconds fall into.
  static double TtftBucket(double seconds);
  BucketExemplars TtftExemplars() const {
    const MutexLock lock(mu);
    return ttft_exemplars;
  }

 private:
  Family<Counter>& AddCounter(const char* name, const char* help);
  Family<Gauge>& AddGauge(const char* name, const char* help);
  Family<Histogram>& AddHistograms(const char* name, const char* help);
  Histogram& AddHistogram(const char* name, const char* help, const Histogram::BucketBoundaries& buckets) {
    return AddHistograms(name, help).Add({}, buckets);
  }

  absl::Time OldestInQueue() const {
    const MutexLock lock(mu);
    return oldest_in_queue;
  }

  // Upper bounds of buckets.
  static const Histogram::BucketBoundaries kWaitBuckets, kPrefillBuckets, kPromptBuckets, kSlowdownBuckets,
      kImbalanceBuckets, kIdleBuckets;

  prometheus::Registry registry_;  // before all that is in it

 public:
  Family<Counter>& requests =
      AddCounter("meshfill_requests_total", "Prefill requests that ended, by gRPC status code.");
  Family<Counter>& refusals =
      AddCounter("meshfill_requests_refused_total",
                 "Of the ended requests, those that had no place, or lost it, by reason.");
  Counter& dropped_results =
      AddCounter("meshfill_results_dropped_total",
                 "Results that their clients did not read in time, or that gave way to newer ones.")
          .Add({});
  Family<Counter>& call_refusals = AddCounter(
      "meshfill_calls_refused_total", "Calls other than Prefill that were refused, by call and status.");
  Family<Counter>& trace_spans = AddCounter(
      "meshfill_trace_spans_total",
      "Spans that the collector at trace.endpoint has taken (exported), and that got lost (dropped).");
  Counter& exported_spans = trace_spans.Add({{"result", "exported"}});
  Counter& dropped_spans = trace_spans.Add({{"result", "dropped"}});
  Gauge& queue_requests =
      AddGauge("meshfill_queue_requests", "Requests that wait or upload; what runs is not counted.").Add({});
  Family<Gauge>& queue_classes =
      AddGauge("meshfill_queue_class_requests", "Requests that wait or upload, by priority class.");
  std::array<Gauge*, std::tuple_size_v<decltype(QueueLoad::requests_by_class)>>
      queue_class_requests;  // of the classes, the lowest first
  Family<Gauge>& queue_tenants = AddGauge(
      "meshfill_queue_tenant_requests",
      "Requests that wait or upload, by the tenants that the configuration names; all others: other.");
  Gauge& queue_tokens =
      AddGauge("meshfill_queue_tokens", "Prompt tokens that wait, and that uploads count. Scale on this.")
          .Add({});
  Gauge& queue_oldest =
      AddGauge("meshfill_queue_oldest_seconds",
               "How long the oldest request has waited since its upload was complete; 0: none waits.")
          .Add({});
  Gauge& queue_max_requests =
      AddGauge("meshfill_queue_max_requests", "The queue's bound in requests (queue.max_requests).").Add({});
  Gauge& queue_max_tokens =
      AddGauge("meshfill_queue_max_tokens", "The queue's bound in tokens (queue.max_tokens).").Add({});
  Gauge& queue_max_wait =
      AddGauge("meshfill_queue_max_wait_seconds", "The queue's bound on the predicted wait (queue.max_wait).")
          .Add({});
  Gauge& running_tokens =
      AddGauge("meshfill_running_tokens", "Prompt tokens of the prefills that have begun; 0: idle.").Add({});
  Histogram& queue_wait = AddHistogram("meshfill_queue_wait_seconds",
                                       "From a complete upload to the prefill's begin.", kWaitBuckets);
  Histogram& ttft = AddHistogram(
      "meshfill_ttft_seconds", "Time to first token: from a request's begin to its result.", kPrefillBuckets);
  Histogram& upload = AddHistogram(
      "meshfill_upload_seconds", "From a request's begin to its complete upload, of answers.", kWaitBuckets);
  Family<Histogram>& ttft_by_prompt =
      AddHistograms("meshfill_ttft_by_prompt_seconds",
                    "Time to first token by the prompt's length: longer than the "
                    "class before, up to so many tokens.");
  Family<Histogram>& slowdown =
      AddHistograms("meshfill_slowdown",
                    "From the complete upload to the result, over the seconds that were predicted for the "
                    "prompt alone on the whole pool, by its length: "
                    "longer than the class before, up to so many tokens.");
  Histogram& request_tokens = AddHistogram("meshfill_request_prompt_tokens",
                                           "Tokens of the prompts of finished prefills.", kPromptBuckets);
  Histogram& prefill =
      AddHistogram("meshfill_prefill_seconds", "Wall time of finished prefills.", kPrefillBuckets);
  Counter& preemptions =
      AddCounter("meshfill_preemptions_total", "Times that a prefill gave way to another and stood still.")
          .Add({});
  Counter& packed = AddCounter("meshfill_packed_prefills_total",
                               "Finished prefills that shared their pass over the weights with others.")
                        .Add({});
  Counter& paused =
      AddCounter("meshfill_paused_seconds_total", "Time that finished prefills stood still for others.")
          .Add({});
  Family<Counter>& computing =
      AddCounter("meshfill_computing_seconds_total",
                 "Time in which a prefill computed; others: whether others waited or stood still then.");
  Counter& computing_alone = computing.Add({{"others", "no"}});
  Counter& computing_beside_others = computing.Add({{"others", "yes"}});
  Counter& prompt_tokens =
      AddCounter("meshfill_prompt_tokens_total", "Prompt tokens of finished prefills.").Add({});
  Family<Counter>& comm_wait = AddCounter(
      "meshfill_comm_wait_seconds_total",
      "Exposed communication: time in which a rank stood still for a chunk, by rank and operation.");
  Family<Counter>& attention_compute =
      AddCounter("meshfill_attention_compute_seconds_total",
                 "Time in which a rank computed attention blocks and merged partial outputs, by rank.");
  Family<Counter>& attention = AddCounter(
      "meshfill_attention_seconds_total",
      "Wall time of a rank's attention, by rank: compute, comm wait, and what is left of it, idle.");
  Family<Counter>& busy = AddCounter("meshfill_rank_busy_seconds_total",
                                     "Wall time of a rank's prefills less its comm wait, by rank.");
  Family<Counter>& mesh_busy = AddCounter(
      "meshfill_mesh_busy_seconds_total",
      "What a rank would have been busy, were all ranks of its prefills alike: their mean, by rank.");
  Family<Counter>& comm_bytes = AddCounter("meshfill_comm_bytes_total",
                                           "Bytes that all ranks sent to each other, by what they carried.");
  Family<Counter>& rank_comm_bytes =
      AddCounter("meshfill_largest_rank_comm_bytes_total",
                 "Bytes sent by the rank that sent most in each prefill, by what they carried.");
  Family<Counter>& predicted_comm_bytes =
      AddCounter("meshfill_predicted_comm_bytes_total",
                 "What the plan's formula says the rank that sends most sends, by what it carries.");
  Gauge& overlap = AddGauge("meshfill_overlap_ratio",
                            "Of the last prefill: share of the ranks' attention time that did not wait for "
                            "communication (1: all hidden).")
                       .Add({});
  Gauge& mfu = AddGauge("meshfill_mfu",
                        "Of the last prefill: model FLOPs done / (seconds x sum of the ranks' peak FLOP/s).")
                   .Add({});
  Gauge& attention_mfu =
      AddGauge("meshfill_attention_mfu", "Of the last prefill: MFU within attention, unmasked pairs only.")
          .Add({});
  Gauge& predicted =
      AddGauge("meshfill_predicted_seconds", "Of the last prefill: the plan's prediction.").Add({});
  Counter& predicted_total = AddCounter("meshfill_predicted_prefill_seconds_total",
                                        "What the plans predicted for all finished prefills, to be held "
                                        "against meshfill_prefill_seconds_sum.")
                                 .Add({});
  Gauge& prediction_ratio =
      AddGauge("meshfill_prediction_ratio",
               "Of the last prefill: real seconds / predicted seconds (above 1: slower than predicted).")
          .Add({});
  Gauge& straggler_spread = AddGauge("meshfill_straggler_spread_seconds",
                                     "Of the last prefill: busy time of the busiest rank less that of the "
                                     "least busy one, waits not counted.")
                                .Add({});
  Histogram& expert_imbalance =
      AddHistogram("meshfill_expert_imbalance",
                   "Of each layer with experts of finished prefills: tokens of its busiest expert over the "
                   "mean of all its experts (1: even).",
                   kImbalanceBuckets);
  Histogram& expert_idle =
      AddHistogram("meshfill_expert_idle_ratio",
                   "Of each layer with experts of finished prefills: share of its experts to which no token "
                   "went.",
                   kIdleBuckets);
  Gauge& worst_expert_imbalance =
      AddGauge("meshfill_expert_worst_imbalance",
               "Of the last prefill: the largest imbalance of a layer's experts; 0: no layer has experts.")
          .Add({});
  Gauge& worst_expert_layer =
      AddGauge("meshfill_expert_worst_layer",
               "Of the last prefill: the layer that meshfill_expert_worst_imbalance is of, from 0.")
          .Add({});
  Gauge& peak_flops = AddGauge("meshfill_peak_flops_per_second",
                               "Peak FLOP/s of all ranks together, to which MFU refers; 0: not known yet.")
                          .Add({});
  Gauge& peak_memory_bytes =
      AddGauge("meshfill_peak_memory_bytes", "Largest resident memory of this process so far.").Add({});
  Gauge& predicted_peak_bytes =
      AddGauge("meshfill_predicted_peak_bytes",
               "Of the last prefill: what the plan predicted for activations and weights of all ranks.")
          .Add({});
  Counter& epochs =
      AddCounter("meshfill_epochs_total",
                 "Memberships of the pool that ran requests: a worker that joins, leaves or is lost "
                 "begins a new one.")
          .Add({});
  Counter& worker_joins = AddCounter("meshfill_worker_joins_total", "Workers that joined.").Add({});
  Counter& worker_losses =
      AddCounter("meshfill_worker_losses_total",
                 "Workers that were lost: dead, cut off, silent or hung. Those that drained are not counted.")
          .Add({});
  Counter& worker_refusals =
      AddCounter("meshfill_worker_refusals_total",
                 "Workers that were refused: another model or version, a name that is taken.")
          .Add({});
  Counter& retries =
      AddCounter("meshfill_requests_retried_total", "Runs begun again for a request whose epoch ended.")
          .Add({});
  Gauge& kv_leases =
      AddGauge("meshfill_kv_leases", "Leases on kept K and V, those of unfinished prefills included.")
          .Add({});
  Gauge& kv_bytes =
      AddGauge("meshfill_kv_bytes",
               "Bytes of K and V that are kept; those for a lease are charged before they are computed.")
          .Add({});
  Gauge& kv_max_bytes =
      AddGauge("meshfill_kv_max_bytes", "The bound on kept K and V (kv.memory_bytes).").Add({});
  Counter& kv_fetched_bytes =
      AddCounter("meshfill_kv_fetched_bytes_total", "Bytes of K and V that clients fetched.").Add({});
  Counter& kv_lapsed =
      AddCounter("meshfill_kv_leases_lapsed_total", "Leases that ended by their time.").Add({});
  Counter& kv_refused =
      AddCounter("meshfill_kv_refused_total", "Requests refused because their K and V had no room.").Add({});
  Gauge& kv_cached_bytes =
      AddGauge("meshfill_kv_cached_bytes", "Of the kept bytes, those that later prompts may begin with.")
          .Add({});
  Gauge& kv_device_bytes =
      AddGauge("meshfill_kv_device_bytes", "Of the kept bytes, those that are in the memory of GPUs.")
          .Add({});
  Counter& kv_hit_tokens =
      AddCounter("meshfill_kv_cache_hit_tokens_total", "Tokens of prompts that came from a cached prefix.")
          .Add({});
  Counter& kv_miss_tokens =
      AddCounter("meshfill_kv_cache_miss_tokens_total", "Tokens of prompts that were looked up and computed.")
          .Add({});
  Counter& kv_evictions =
      AddCounter("meshfill_kv_cache_evictions_total", "Cached prompts that made room for others.").Add({});
  Counter& kv_evicted_bytes =
      AddCounter("meshfill_kv_cache_evicted_bytes_total", "Bytes of K and V that were free then.").Add({});
  Family<Gauge>& kv_worker_leases =
      AddGauge("meshfill_kv_worker_leases",
               "Leases of whose K and V a worker holds a part, or is to hold one, by worker.");
  Family<Gauge>& kv_worker_bytes =
      AddGauge("meshfill_kv_worker_bytes", "Bytes of K and V charged to a worker, by worker.");
  Family<Gauge>& kv_worker_max_bytes =
      AddGauge("meshfill_kv_worker_max_bytes", "The bound on what a worker keeps, by worker.");
  Family<Gauge>& ranks = AddGauge("meshfill_ranks", "Ranks of the pool, by state.");
  Family<Gauge>& build_info = AddGauge("meshfill_build_info", "1, with the build as labels.");
  Family<Gauge>& plan_info =
      AddGauge("meshfill_plan_info", "1, with the plan of the last prefill as labels.");

  mutable Mutex mu;
  absl::Time oldest_in_queue ABSL_GUARDED_BY(mu) = absl::InfiniteFuture();
  Gauge* plan_gauge ABSL_GUARDED_BY(mu) = nullptr;  // of plan_info: the one that is set; null: none yet
  std::map<std::string, Gauge*> queue_of_tenants ABSL_GUARDED_BY(mu);  // of queue_tenants, by name
  // By name: leases, bytes and their bound.
  std::map<std::string, std::array<Gauge*, 3>> kv_of_workers ABSL_GUARDED_BY(mu);
  BucketExemplars ttft_exemplars ABSL_GUARDED_BY(mu);
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_METRIC_FAMILIES_H_
