// The queue of prefills: bounded, by priority and then by arrival, one prefill at a time on the engine.
//
//     Reserve (header)  ──►  Slot.Submit (upload complete)  ──►  runs  ──►  Waiter.OnPrefillDone
//        │ refused: UNAVAILABLE, ALREADY_EXISTS,    │
//        │ RESOURCE_EXHAUSTED with RetryInfo        └ Slot.Withdraw at any time
//
// A place is taken by the announced token count when the header comes, so that uploads are bounded too. What
// waits and what uploads count towards the limits; what runs does not. The predicted wait of a new request is
// the rest of the prefill that runs, and the predicted seconds of all with at least its priority that wait or
// upload.
//
// Thread-safe. Waiters are called from the queue's thread or the engine's threads, never under the queue's
// lock.
#ifndef MESHFILL_SERVER_API_PREFILL_QUEUE_H_
#define MESHFILL_SERVER_API_PREFILL_QUEUE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "kernels/mutex.h"
#include "kernels/stop_token.h"
#include "server/observe/metrics.h"

namespace meshfill {

class PrefillQueue {
 public:
  struct Limits {
    int64_t max_requests = 64;  // waiting and uploading
    int64_t max_tokens = 16 << 20;
    absl::Duration max_wait = absl::Hours(1);
  };

  struct Request {
    std::string id;
    int64_t tokens = 0;
    int priority = 0;  // higher first
    double predicted_seconds = 0;
    absl::Time deadline = absl::InfiniteFuture();
  };

  // Who waits for a prefill. Must return quickly.
  class Waiter {
   public:
    virtual ~Waiter() = default;
    virtual void OnLayerDone(int layers_done, int layers, double seconds_since_begin) = 0;
    // Once, last. `queue_seconds`: from Submit to the prefill's begin.
    virtual void OnPrefillDone(absl::StatusOr<PrefillResult> result, double queue_seconds) = 0;
  };

  // A request's place, from its header to its end. Destroying it withdraws the request. The queue outlives
  // it.
  class Slot {
   public:
    Slot(PrefillQueue& queue, uint64_t ticket) : queue_(queue), ticket_(ticket) {}
    ~Slot() { queue_.Withdraw(ticket_); }
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;

    // Queues the complete prompt, once; returns the requests before it, the running one included. From now on
    // the waiter hears of the request's end, unless it is withdrawn while it waits. UNAVAILABLE after
    // StopAll.
    absl::StatusOr<int> Submit(std::vector<uint32_t> tokens, const PrefillOptions& options,
                               std::shared_ptr<Waiter> waiter);

   private:
    PrefillQueue& queue_;
    const uint64_t ticket_;
  };

  struct Snapshot {
    int64_t requests = 0;  // waiting and uploading
    int64_t tokens = 0;
    std::string running_id;  // empty: idle
    int running_layers_done = 0;
    int running_layers = 0;
  };

  // Both outlive the queue.
  PrefillQueue(PrefillEngine& engine, const Limits& limits, Metrics& metrics);
  ~PrefillQueue();  // StopAll, then waits for the engine
  PrefillQueue(const PrefillQueue&) = delete;
  PrefillQueue& operator=(const PrefillQueue&) = delete;

  // ALREADY_EXISTS: the id is live, whatever the body; wait for that one or choose another id.
  // DEADLINE_EXCEEDED: it has passed. RESOURCE_EXHAUSTED with RetryInfo: no room, or the deadline is before
  // wait + prefill; try again after the predicted seconds until that changes, at least 1 s. UNAVAILABLE:
  // draining.
  absl::StatusOr<std::unique_ptr<Slot>> Reserve(const Request& request);

  void Drain();                              // from now on Reserve refuses; what has a slot goes on
  void StopAll(const absl::Status& reason);  // and ends everything with `reason`: waiters hear it
  Snapshot snapshot() const;

 private:
  enum class Phase { kUploading, kWaiting, kRunning };
  struct Job {
    Request request;
    Phase phase = Phase::kUploading;
    uint64_t arrival = 0;  // order of Submit
    absl::Time submitted_at;
    std::vector<uint32_t> tokens;
    PrefillOptions options;
    std::shared_ptr<Waiter> waiter;  // shared: a stream may end while its prefill is being stopped
    StopToken stop;
    absl::Status stop_reason;  // why `stop` is raised
  };
  struct Running {
    Job* job = nullptr;  // null: idle
    absl::Time begin;
    absl::Time last_layer_at;
    int layers_done = 0;
    int layers = 0;
  };
  class ProgressObserver;

  absl::StatusOr<int> Submit(uint64_t ticket, std::vector<uint32_t> tokens, const PrefillOptions& options,
                             std::shared_ptr<Waiter> waiter);
  void Withdraw(uint64_t ticket);
  void OnLayerDone(int layers_done, int layers);

  void RunJobs();  // the queue's thread
  void RunJob(uint64_t ticket, Job& job);
  // The ticket of the best waiting job; 0: none.
  uint64_t NextTicket() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static bool Before(const Job& left, const Job& right);

  absl::Status CheckRoom(const Request& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  double RunningRestSeconds() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  double PredictedWaitSeconds(int priority) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  double SecondsUntilRoom(const Request& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Snapshot Count() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PublishCount() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  PrefillEngine& engine_;
  const Limits limits_;
  Metrics& metrics_;

  mutable Mutex mu_;
  CondVar changed_;
  std::map<uint64_t, std::unique_ptr<Job>> jobs_ ABSL_GUARDED_BY(mu_);  // by ticket, which starts at 1
  Running running_ ABSL_GUARDED_BY(mu_);
  uint64_t last_ticket_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t last_arrival_ ABSL_GUARDED_BY(mu_) = 0;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status stop_reason_ ABSL_GUARDED_BY(mu_);
  std::thread runner_;  // last: it uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_PREFILL_QUEUE_H_
