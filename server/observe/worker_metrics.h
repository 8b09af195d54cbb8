// The Prometheus metrics of a worker process (docs/metrics.md), and the pages that it serves.
//
// What the ranks do in a prefill is in the front-end's metrics (metrics.h). Thread-safe.
#ifndef MESHFILL_SERVER_OBSERVE_WORKER_METRICS_H_
#define MESHFILL_SERVER_OBSERVE_WORKER_METRICS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/observe/http_pages.h"

namespace meshfill {

// A worker as it is now.
struct WorkerLoad {
  bool member = false;  // it belongs to a pool
  int runs = 0;         // runs that it takes part in
  int64_t kv_leases = 0;
  int64_t kv_bytes = 0;             // charged
  int64_t kv_max_bytes = 0;         // the bound on them
  int64_t shared_weight_bytes = 0;  // where workers share weights: this one's share, and what runs gathered
};

class WorkerMetrics {
 public:
  WorkerMetrics();
  ~WorkerMetrics();
  WorkerMetrics(const WorkerMetrics&) = delete;
  WorkerMetrics& operator=(const WorkerMetrics&) = delete;

  void Set(const WorkerLoad& load);
  std::string Text(MetricsFormat format = MetricsFormat::kPrometheus) const;  // what /metrics answers

  // /metrics, and /readyz: 200 while the worker belongs to a pool, else 503. The metrics outlive the pages.
  std::vector<HttpPage> Pages() const;

 private:
  class Families;  // keeps Prometheus' headers out of this one
  std::unique_ptr<Families> families_;
  std::atomic<bool> member_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_WORKER_METRICS_H_
