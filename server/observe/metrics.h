// The server's Prometheus metrics (docs/metrics.md): what each name means stands in its help text, in
// metric_families.h.
//
// Thread-safe. Label values come from fixed sets (status codes, operations, ranks and workers of the pool,
// states), never from clients; a worker's go with it, and the plan's labels are those of the one plan used
// last.
#ifndef MESHFILL_SERVER_OBSERVE_METRICS_H_
#define MESHFILL_SERVER_OBSERVE_METRICS_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "server/observe/metrics_format.h"
#include "server/observe/span_exporter.h"

namespace meshfill {

enum class PoolState { kLoading, kReady, kDraining };
inline constexpr PoolState kPoolStates[] = {PoolState::kLoading, PoolState::kReady, PoolState::kDraining};
const char* PoolStateName(PoolState state);  // "loading", "ready", "draining"

// Why a request had no place.
enum class Refusal {
  kInvalid,  // its header or tokens
  kUnknownModel,
  kTooLong,        // for the model's context
  kPoolTooSmall,   // this pool cannot do what is asked: too little memory, or it keeps no K and V
  kDuplicate,      // its id is in use
  kQueueRequests,  // the queue is full, by requests, tokens or the predicted wait
  kQueueTokens,
  kQueueWait,
  kTenantShare,  // the tenant has as much as its limits allow
  kDeadline,     // it cannot be met, or the upload took too long
  kKvRoom,       // no room for the K and V that are to be kept
  kMemory,       // no memory for its tokens
  kCredentials,  // none, or not enough
  kNotReady,     // loading, draining, or no workers
  kOther,
};
const char* RefusalName(Refusal refusal);  // "queue_tokens"

// What is in the queue now.
struct QueueLoad {
  int64_t requests = 0;  // requests that wait or upload
  int64_t tokens = 0;
  std::array<int64_t, 5> requests_by_class{};  // these requests by priority, -2 first
  // These requests by the tenants that the configuration names; all others are "other".
  std::map<std::string, int64_t> requests_by_tenant = {};
  int64_t running_tokens = 0;
  absl::Time oldest = absl::InfiniteFuture();  // since when the oldest one waits; infinite: none does
};

// A pool of worker processes.
struct PoolLoad {
  std::map<std::string, int> ranks_by_state;  // a state that is left out has no ranks
  uint64_t epochs = 0;                        // this and the rest: since the start
  uint64_t joins = 0;
  uint64_t losses = 0;
  uint64_t refusals = 0;
  uint64_t retries = 0;
};

// K and V that are kept, for clients and as a cache.
struct KvLoad {
  int64_t leases = 0;
  int64_t bytes = 0;         // charged
  int64_t max_bytes = 0;     // the bound on them
  uint64_t lapsed = 0;       // leases, since the start
  uint64_t refused = 0;      // requests, since the start
  int64_t cached_bytes = 0;  // bytes that later prompts may begin with
  uint64_t hit_tokens = 0;   // looked-up prompts: cached tokens, and computed ones; since the start
  uint64_t miss_tokens = 0;
  uint64_t evictions = 0;  // prompts, and what was free then; since the start
  uint64_t evicted_bytes = 0;
  int64_t device_bytes = 0;  // bytes in the memory of GPUs
};

// A request's result. Seconds are from the stream's begin.
struct FirstToken {
  double seconds = 0;         // TTFT: to the result
  double upload_seconds = 0;  // to the complete upload
  double slowdown = 0;        // from the complete upload to the result, over the prediction for it alone
  int64_t prompt_tokens = 0;
  std::string trace_id = {};  // 32 hexadecimal digits, of a trace that somebody records; empty: none
};

class MetricFamilies;  // keeps Prometheus' headers out of this one

class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // What /metrics answers. OpenMetrics has the traces of the latest requests beside the buckets of TTFT.
  std::string Text(MetricsFormat format = MetricsFormat::kPrometheus) const;

  void SetPool(PoolState state, int ranks);  // all ranks are in `state`
  void SetWorkers(const PoolLoad& load);     // in place of SetPool where workers join
  void SetPeakFlops(double flops_per_second);
  void SetQueueLimits(int64_t max_requests, int64_t max_tokens, absl::Duration max_wait);
  void SetQueue(const QueueLoad& load);
  void SetKv(const KvLoad& load);
  void SetKvOfWorkers(const std::map<std::string, KvLoad>& by_name);  // each worker's; sets no totals
  void OnKvFetched(int64_t bytes);
  void SetTraceSpans(const SpanExporter::Counts& counts);
  void OnPrefillStart(double queue_seconds);
  void OnPreempted();  // a prefill that computed gave way to another
  // The ranks have computed; `others`: while others waited, or stood still.
  void OnComputed(double seconds, bool others);
  void OnPrefillDone(const PrefillResult& result);
  void OnRequestDone(absl::StatusCode code);
  void OnRequestRefused(Refusal refusal);  // beside OnRequestDone
  void OnResultDropped();                  // nobody read it
  // A call other than Prefill was refused. `call` is its name, e.g. "FetchKv", one of a fixed set.
  void OnCallRefused(const char* call, absl::StatusCode code);
  void OnFirstToken(const FirstToken& first);

 private:
  std::unique_ptr<MetricFamilies> families_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_METRICS_H_
