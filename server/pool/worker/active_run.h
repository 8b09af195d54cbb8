// One run's ranks of a worker, from Prepare to Release or Stop: what they hold, and the threads that compute
// it.
//
//     CheckWeights, Reserve, BeginKv, OpenStreams, Listen ──► Start ──► Join ──► End
//
// One thread makes these calls, in this order; it may end the run after any of them, by Abort, Join and End.
// Pause, Resume, Abort and progress come from any thread, at any time.
#ifndef MESHFILL_SERVER_POOL_WORKER_ACTIVE_RUN_H_
#define MESHFILL_SERVER_POOL_WORKER_ACTIVE_RUN_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/comm/data_plane.h"
#include "engine/comm/message_gate.h"
#include "engine/embedded_pool.h"
#include "engine/run/local_ranks.h"
#include "engine/run/rank_runner.h"
#include "engine/run/rank_weights.h"
#include "engine/run/sharded_weights.h"
#include "kernels/mutex.h"
#include "server/pool/run_plan.h"
#include "server/pool/worker/counting_stream.h"
#include "server/pool/worker/held_kv.h"
#include "server/pool/worker/rank_pack.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill {

class ActiveRun {
 public:
  // What all runs of a worker share. All of it outlives them.
  struct Worker {
    const EmbeddedPool& pool;
    ShardedWeights* sharded;  // null: weights are not shared among workers
    DataPlane& data_plane;
    HeldKv& kv;
    std::atomic<bool>& lost;  // set where a device has failed for good
  };
  // Called from the ranks' threads.
  struct Events {
    std::function<void(int seat, absl::StatusOr<RankOutput> output)> on_rank_done;
    std::function<void(uint64_t pause)> on_still;  // all ranks stand still where PauseAt wants them
    std::function<void(int rank, int strangers)> on_strangers;  // refused at the rank's data port, so far
  };

  // `pack`: where it shares a pass with others; null: it does not.
  ActiveRun(WorkerMachine::RunPart part, const Worker& worker, Events events, std::shared_ptr<RankPack> pack);
  ~ActiveRun() { JoinAborter(); }

  uint64_t number() const { return part_.number; }
  uint64_t data_plane_run() const { return DataPlaneRun(part_.epoch, part_.number, Traffic::kQ); }
  int64_t reserve_bytes() const { return part_.reserve_bytes; }
  bool SharesWeights() const { return part_.weights.share.of > 0; }

  // A leader that counts on other weights than these has been told so by another worker.
  absl::Status CheckWeights() const;
  // Holds the memory of the run until its ranks take it, so that a lack of it shows before any rank's first
  // step.
  absl::Status Reserve();
  // Where K and V of cached tokens are, and where the others go, from now on, if they are kept.
  absl::Status BeginKv();
  // Each rank's stream, from now on: its progress is asked for before it runs.
  absl::Status OpenStreams();
  absl::StatusOr<std::vector<std::string>> Listen();
  void Start(std::vector<std::string> addresses, std::vector<LinkProbe> probes);
  // What an error has left queued uses the weights. No peer is waited for: the run is over for all of them.
  void Join();
  // Frees what the run holds, there and then: who reads progress or aborts may have the run itself for
  // longer. After Join; from here on Abort finds no endpoint, and progress no rank.
  void End();

  // Pause answers how many messages have begun.
  int64_t Pause(uint64_t number);
  void PauseAt(uint64_t number, int64_t messages);
  void Resume();
  // Waits for no connection to end: NCCL's may take seconds, while the worker has to say that it lives.
  void Abort(const absl::Status& reason);
  // Nothing before the start and after the end.
  std::vector<WorkerMachine::RankProgress> progress() const;

 private:
  struct Seat {
    std::unique_ptr<CountingStream> stream;  // outlives the communicator; null: it computes in a pack
    std::unique_ptr<Endpoint> endpoint;
    std::unique_ptr<Communicator> communicator;
    std::atomic<int> layers_done{0};
    // Where connecting takes seconds, each report meanwhile counts as an operation: a deadline ends it.
    std::atomic<bool> connecting{false};
    mutable std::atomic<uint64_t> connecting_reports{0};
  };

  int seat(size_t i) const { return part_.first_rank + static_cast<int>(i); }         // seat in the run
  int rank(size_t i) const { return part_.plan.RankAt(seat(i)); }                     // rank of the plan
  size_t local(size_t i) const { return static_cast<size_t>(part_.local_rank) + i; }  // of this worker

  void JoinAborter();
  absl::StatusOr<std::unique_ptr<Endpoint>> ListenFor(size_t i) const;
  // Begins to read or gather. The ranks measure their links first, where they do.
  void OpenWeights(const std::vector<bool>& reads_head);
  absl::StatusOr<RankOutput> RunSeat(size_t i);
  absl::StatusOr<RankOutput> RunInPack();
  // Says so, once, where a rank failed because its device is lost.
  void LookForLoss(size_t i, const absl::Status& failure);
  void OnStill(uint64_t pause);  // from here to Resume no time counts

  WorkerMachine::RunPart part_;
  const Worker worker_;
  const Events events_;
  const std::shared_ptr<RankPack> pack_;   // null: it shares no pass
  std::shared_ptr<const KvSlabs> prefix_;  // K and V of the plan's cached tokens; null: there are none
  std::shared_ptr<KvPrompt> kv_;           // null: K and V are dropped
  std::vector<BufferRef> reservations_;    // hold the memory that the run will take; until it starts
  std::vector<std::string> addresses_;     // by rank of the whole run
  std::vector<LinkProbe> probes_;          // all probes of the run
  StopToken stop_;                         // stops all streams
  std::unique_ptr<MessageGate> gate_;      // null: its ranks stand still anywhere
  Mutex pause_mu_;
  uint64_t pause_ ABSL_GUARDED_BY(pause_mu_) = 0;  // number of the one that lasts; 0: none, or without one
  Mutex mu_;
  absl::Status abort_reason_ ABSL_GUARDED_BY(mu_);
  std::thread aborter_ ABSL_GUARDED_BY(mu_);  // of the endpoints; at most one in the run's life
  mutable Mutex progress_mu_;                 // not mu_: an abort may take long
  bool ended_ ABSL_GUARDED_BY(progress_mu_) = false;
  std::atomic<bool> started_{false};
  std::vector<Seat> seats_;                     // by rank of this worker; endpoints are set under mu_
  std::unique_ptr<Endpoint> weights_endpoint_;  // set under mu_; null: the weights are not shared
  std::optional<RankWeights> weights_;          // from the start on
  LocalRanks ranks_;                            // last: its threads use all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_ACTIVE_RUN_H_
