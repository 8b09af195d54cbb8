// The server's Prometheus metrics (DESIGN §11): what each name means stands in its help text, in metrics.cc.
//
// Thread-safe. Label values come from fixed sets (status codes, operations, ranks of the pool, states), never
// from clients; the plan's labels are those of the one plan used last.
#ifndef MESHFILL_SERVER_METRICS_H_
#define MESHFILL_SERVER_METRICS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/prefill_engine.h"

namespace prometheus {
class Exposer;
}

namespace meshfill {

enum class PoolState { kLoading, kReady, kDraining };
const char* PoolStateName(PoolState state);  // "loading", "ready", "draining"

class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Serves GET /metrics on `address` (HOST:PORT, port 0: any) from now on and returns the real address.
  // UNAVAILABLE where it cannot be bound. Call it at most once.
  absl::StatusOr<std::string> Listen(const std::string& address);

  std::string Text() const;  // what /metrics answers

  void SetPool(PoolState state, int ranks);         // all ranks are in `state`
  void SetQueue(int64_t requests, int64_t tokens);  // waiting and uploading
  void OnPrefillStart(double queue_seconds);
  void OnPrefillDone(const PrefillResult& result);
  void OnRequestDone(absl::StatusCode code);
  void OnFirstToken(double seconds);  // TTFT: from the stream's begin to its result

 private:
  class Families;                       // keeps Prometheus' headers out of this one
  std::shared_ptr<Families> families_;  // shared with the exposer, which asks for a weak_ptr
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_METRICS_H_
