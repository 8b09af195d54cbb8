// The queue of prefills: bounded, and in the order of RunOrder, which says whose turn it is. One prefill
// computes at a time, or several side by side on sub-meshes of the pool; those that gave way to them stand
// still in the engine, which holds as many as it can. Several may share one pass: the engine begins them
// together (PrefillEngine::StartPack), and each has its own end. Where it cannot, each begins by itself.
//
//     Reserve (header)  ──►  Slot.Submit (upload complete)  ──►  runs  ──►  Waiter.OnPrefillDone
//        │ refused: UNAVAILABLE, ALREADY_EXISTS,    │
//        │ RESOURCE_EXHAUSTED                       └ Slot.Withdraw at any time
//
// A place is taken when the header comes, so that uploads are bounded too: QueueRoom says whether a request
// may enter, and which others lose their places to it before they have begun. Others wait for an upload once
// half of it has come. Whether a request is let in goes by what RunOrder would do if nothing else came.
//
// Thread-safe. Waiters are called from the queue's threads, one for each prefill that may live in the engine,
// from the engine's threads, or from whoever takes their places, never under the queue's lock.
#ifndef MESHFILL_SERVER_QUEUE_PREFILL_QUEUE_H_
#define MESHFILL_SERVER_QUEUE_PREFILL_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "server/observe/last_prefill.h"
#include "server/observe/liveness.h"
#include "server/observe/metrics.h"
#include "server/queue/queue_room.h"
#include "server/queue/run_order.h"

namespace meshfill {

class PrefillQueue {
 public:
  using Limits = QueueRoom::Limits;

  struct Request {
    std::string id;
    std::string tenant;
    int64_t tokens = 0;
    int priority = 0;  // higher first; ClassOf bounds it
    double predicted_seconds = 0;
    absl::Time deadline = absl::InfiniteFuture();
    std::vector<SubmeshSeconds> submeshes = {};  // sub-meshes that it may run on (PrefillEngine::Submeshes)
    PackShare pack = {};                         // what it brings to a pass (PrefillEngine::ShareOfPack)
    double may_save_seconds = 0;  // of predicted_seconds, at most, by what is cached: until Submit
  };

  // Who waits for a prefill. Must return quickly.
  class Waiter {
   public:
    virtual ~Waiter() = default;
    // The engine is given the prompt; where it has no room yet, it is so again later.
    virtual void OnPrefillBegin() {}
    virtual void OnLayerDone(int layers_done, int layers, double seconds_since_begin) = 0;
    // Called once, last. RESOURCE_EXHAUSTED, with RetryInfo: it lost its place, or has no memory though no
    // other prefill lives. `queue_seconds`: from Submit to the prefill's begin, and its pauses.
    virtual void OnPrefillDone(absl::StatusOr<PrefillResult> result, double queue_seconds) = 0;
  };

  // Where a complete prompt stands.
  struct Turn {
    int before = 0;           // requests that it waits for, running ones included
    double wait_seconds = 0;  // predicted until its turn and of its pauses (RunOrder::LikelyEndSeconds)
    int submeshes = 1;        // it runs on one of so many
    double pass_seconds = 0;  // predicted, of the pass that it shares; 0: it shares none
  };

  // A request's place, from its header to its end. Destroying it withdraws the request. The queue outlives
  // it.
  class Slot {
   public:
    Slot(PrefillQueue& queue, uint64_t ticket) : queue_(queue), ticket_(ticket) {}
    ~Slot() { queue_.Withdraw(ticket_); }
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;

    // What the prefill is predicted to take, on the whole pool, on sub-meshes and of a pass that it shares,
    // now that more is known of it: its turn, and the wait of later requests, go by that.
    void SetPredictedSeconds(double seconds, std::vector<SubmeshSeconds> submeshes,
                             const PackShare& pack = {});

    // So many of its tokens have come. RESOURCE_EXHAUSTED: the queue or the tenant has no room for more of
    // them, or its place went to others; with RetryInfo.
    absl::Status Pay(int64_t tokens_so_far);

    // Queues the complete prompt, once. RESOURCE_EXHAUSTED, too, where its deadline let it in for what may be
    // cached alone, and too little is. From now on the waiter hears of the request's end, unless it is
    // withdrawn while it waits. UNAVAILABLE after StopAll; RESOURCE_EXHAUSTED as Pay. A waiter hears that,
    // too, where its place goes to another tenant before it begins.
    absl::StatusOr<Turn> Submit(std::vector<uint32_t> tokens, const PrefillOptions& options,
                                std::shared_ptr<Waiter> waiter);

   private:
    PrefillQueue& queue_;
    const uint64_t ticket_;
  };

  enum class Phase { kRunning, kPaused, kWaiting, kUploading };
  struct JobView {
    std::string id;
    std::string tenant;
    Phase phase = Phase::kUploading;
    int64_t tokens = 0;
    double elapsed_seconds = 0;         // since its prefill began; before that, since its header came
    double predicted_rest_seconds = 0;  // until its prefill ends
    int layers_done = 0;                // by all ranks
    int layers = 0;                     // layers of all pieces of the prompt; 0: it has not begun
  };
  struct Snapshot {
    int64_t requests = 0;       // waiting and uploading
    int64_t tokens = 0;         // tokens of these requests
    std::vector<JobView> jobs;  // the one that runs, those that gave way, those that wait, uploads; by turns
  };

  // The time of deadlines and of all that is counted, as MonotonicNow is. From any thread.
  using Clock = std::function<absl::Time()>;

  // The engine, the metrics and the last prefill outlive the queue.
  PrefillQueue(PrefillEngine& engine, const Limits& limits, Metrics& metrics, LastPrefill& last_prefill,
               Clock clock = MonotonicNow);
  ~PrefillQueue();  // StopAll, then waits for the engine
  PrefillQueue(const PrefillQueue&) = delete;
  PrefillQueue& operator=(const PrefillQueue&) = delete;

  // ALREADY_EXISTS: as CheckId. PERMISSION_DENIED: the tenant may not send that class. DEADLINE_EXCEEDED: it
  // has passed. RESOURCE_EXHAUSTED: no room, or the deadline is before wait + prefill; with RetryInfo where
  // waiting helps (queue_room.h). UNAVAILABLE: draining.
  absl::StatusOr<std::unique_ptr<Slot>> Reserve(const Request& request);
  // ALREADY_EXISTS: the tenant has a live request of that id; wait for its end or choose another id. Other
  // tenants' ids are their own.
  absl::Status CheckId(const std::string& tenant, const std::string& id) const;

  void Drain();                              // from now on Reserve refuses; what has a slot goes on
  void StopAll(const absl::Status& reason);  // drains, and ends everything with `reason`: waiters hear it
  Snapshot snapshot() const;
  // What has the turn and stands still for too long (liveness.h); empty: nothing. A few times in a second.
  std::string standstill(absl::Time now);

 private:
  struct Job {
    uint64_t ticket = 0;
    Request request;
    absl::Time reserved_at;
    absl::Time submitted_at;
    std::vector<uint32_t> tokens;
    PrefillOptions options;
    std::shared_ptr<Waiter> waiter;  // shared: a stream may end while its prefill is being stopped

    bool needs_cache = false;  // it was let in for what may be cached of it alone
    bool begun = false;        // a thread of the queue has it, or will
    // When it began, once it has.
    absl::Time begin = absl::InfiniteFuture();
    std::unique_ptr<PrefillObserver> observer;  // outlives `prefill`
    int layers_done = 0;
    int layers = 0;
    Prefill* prefill = nullptr;  // null: the engine has not begun it, or is done
    bool stopped = false;
    absl::Status stop_reason;  // not OK: what the waiter hears instead of the engine's status
  };
  class ProgressObserver;
  class Dropped;

  absl::StatusOr<Turn> Submit(uint64_t ticket, std::vector<uint32_t> tokens, const PrefillOptions& options,
                              std::shared_ptr<Waiter> waiter);
  void SetPredictedSeconds(uint64_t ticket, double seconds, std::vector<SubmeshSeconds> submeshes,
                           const PackShare& pack);
  absl::Status Pay(uint64_t ticket, int64_t tokens_so_far);
  void Withdraw(uint64_t ticket);
  void OnLayerDone(Job& job, int layers_done, int layers);
  void OnBegunAnew(const Job& job);
  void StopLive(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Lets those whose turn it is compute, and the others stand still.
  void GiveTurn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Preempt(Prefill& prefill);
  void RunJobs();  // each of the queue's threads
  // One, or several that share a pass, until each has ended or waits again.
  void RunTogether(const std::vector<Job*>& jobs);
  absl::Status CheckBegin(const Job& job) const;  // not OK: it does not begin, though its turn has come
  // None where they could not begin: each of them waits again or has ended.
  std::vector<std::unique_ptr<Prefill>> Begin(const std::vector<Job*>& jobs);
  absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> StartOnEngine(const std::vector<Job*>& jobs);
  void OnBegun(Job& job, Prefill& prefill) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // It could not begin. `apart`: next time by itself.
  void WaitAgain(Job& job, bool apart) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndJob(Job& job, absl::StatusOr<PrefillResult> result);
  Phase PhaseOf(uint64_t ticket, const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Computes(uint64_t ticket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void RemoveLosers(std::span<const QueueRoom::LostPlace> places, Dropped& dropped)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What they hear, once the places are taken.
  void TellLosers(std::span<const QueueRoom::LostPlace> places, Dropped& dropped)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Lose(Job& job, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckUnused(const std::string& tenant, const std::string& id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Forgets the request. The caller frees its job, best after the lock.
  std::unique_ptr<Job> Remove(uint64_t ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<std::unique_ptr<Job>> Remove(std::span<const uint64_t> tickets)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  RunOrder::Job ToRunOrder(const Request& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PublishCount() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Counts the time until now as it was, and goes on as it is.
  void CountComputing(bool others) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Clock clock_;
  PrefillEngine& engine_;
  Metrics& metrics_;
  LastPrefill& last_prefill_;

  mutable Mutex mu_;
  CondVar changed_;
  // The same tickets stand in jobs_, order_ and room_, from Reserve to Remove. They start at 1.
  std::map<uint64_t, std::unique_ptr<Job>> jobs_ ABSL_GUARDED_BY(mu_);
  std::set<std::pair<std::string, std::string>> ids_ ABSL_GUARDED_BY(mu_);  // of jobs_: tenant and id
  RunOrder order_ ABSL_GUARDED_BY(mu_);
  QueueRoom room_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> computing_ ABSL_GUARDED_BY(mu_);  // the tickets whose turn it is
  absl::Time counted_until_ ABSL_GUARDED_BY(mu_);
  bool computes_ ABSL_GUARDED_BY(mu_) = false;     // somebody has computed since counted_until_
  bool others_wait_ ABSL_GUARDED_BY(mu_) = false;  // others wait or stand still since counted_until_
  // Chosen, for the next free threads: one, or several that share a pass.
  std::deque<std::vector<uint64_t>> to_begin_ ABSL_GUARDED_BY(mu_);
  StandstillWatch watch_ ABSL_GUARDED_BY(mu_);
  uint64_t last_ticket_ ABSL_GUARDED_BY(mu_) = 0;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::map<uint64_t, absl::Status> lost_ ABSL_GUARDED_BY(mu_);  // why uploads have no places, until Withdraw
  std::vector<std::thread> runners_;  // one for each prefill that may live; last: they use all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_PREFILL_QUEUE_H_
