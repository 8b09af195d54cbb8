// The ranks of one worker process: the weights, loaded once, and the threads that compute runs with them.
//
// Prepare, Start, Stop and Release return at once and are carried out in order by a thread of the host's own;
// Stop also raises the run's stop token and aborts its communicators there and then, so that no wait outlives
// it. Thread-safe.
//
// Runs know nothing of each other: each rank of each has a thread, a stream and connections of its own, but
// for those that share a pass (rank_pack.h). One that stands still keeps its memory and these alone. Where
// messages of runs do not mix (data_plane.h), its ranks stand still where those of its other workers do
// (message_gate.h).
#ifndef MESHFILL_SERVER_POOL_WORKER_RANK_HOST_H_
#define MESHFILL_SERVER_POOL_WORKER_RANK_HOST_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/comm/data_plane.h"
#include "engine/embedded_pool.h"
#include "engine/run/rank_runner.h"
#include "engine/run/sharded_weights.h"
#include "kernels/mutex.h"
#include "meshfill/v1/control.pb.h"
#include "server/pool/worker/held_kv.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill {

class ActiveRun;
class RankPack;

class RankHost {
 public:
  struct Options {
    std::string model_path;
    std::optional<DType> dtype;
    std::optional<WeightMode> weights;  // this and the next: as in EngineOptions
    bool may_share = false;
    std::string device = "auto";  // one of DeviceNames() (platforms.h); on GPUs: one for each rank
    int ranks = 1;
    int threads = 0;           // CPU threads of all ranks together; 0: one per core
    double peak_flops = 0;     // FLOP/s of all ranks together; 0: measured
    int64_t memory_bytes = 0;  // for the activations of all runs; 0: 80 % of what is free after the load
    // For K and V that CPUs keep; none: an eighth of the above. Of those behind GPUs, what stays there.
    std::optional<int64_t> kv_memory_bytes;
    std::optional<int64_t> kv_host_memory_bytes;  // for those behind GPUs; none: a tenth of what is free
    std::string data_listen = "127.0.0.1";
    bool encrypt = false;            // the data plane
    int nccl_ctas = 8;               // most CTAs that NCCL takes on a GPU; 0: NCCL decides
    int attention_sm_margin = 8;     // GPU multiprocessors that attention leaves to NCCL
    std::vector<int> devices = {};   // GPUs by number, one for each rank; empty: the first ones
    std::string speed_profile_path;  // keeps this host's measured speed (pool_profile.h); empty: measured
    bool measure_speed = false;      // whatever the profile keeps
  };

  // Called from the host's threads, without its locks.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnRunPrepared(uint64_t run, absl::StatusOr<std::vector<std::string>> addresses) = 0;
    // Not after a device was lost.
    virtual void OnRankDone(uint64_t run, int rank, absl::StatusOr<RankOutput> output) = 0;
    // After Pause with a number above 0, and after PauseAt with it, once all ranks stand still.
    virtual void OnRunPaused(uint64_t run, uint64_t pause, int64_t messages, bool still) = 0;
    virtual void OnRunStopped(uint64_t run) = 0;
  };

  // Loads the model and measures the machine. Errors: those of Model::Load. The listener outlives the host.
  static absl::StatusOr<std::unique_ptr<RankHost>> Load(const Options& options, Listener& listener);
  ~RankHost();  // stops what runs

  // What this host offers: ranks, devices, memory, speed, model.
  void Describe(v1::Join& offer) const;

  int layers() const { return pool_.models.front()->shape().layers; }

  void Prepare(WorkerMachine::RunPart part);
  void Start(uint64_t run, std::vector<std::string> addresses, std::vector<LinkProbe> probes);
  // There and then: the ranks of a run that has been prepared stand still between two tiles, or go on.
  // Nothing where there is none, or it is being stopped.
  // A pause with a number above 0 is one of a run whose messages do not mix with others': its ranks go on to
  // where the furthest of them is, and after PauseAt to where the furthest one of all workers is.
  void Pause(uint64_t run, uint64_t number);
  void PauseAt(uint64_t run, uint64_t number, int64_t messages);
  void Resume(uint64_t run);
  void Stop(uint64_t run, const std::string& reason);
  void Release(uint64_t run);
  WorkerMachine::ProgressOfRuns progress() const;
  void EndKv(const std::string& lease);  // takes effect after the calls above
  void EndKvRun(uint64_t run);           // takes effect after the calls above
  void EndAllKv();                       // takes effect after the calls above
  HeldKv& kv() { return kv_; }           // what the ranks keep; Prepare begins, Release keeps, Stop drops
  // What shared weights take: the worker's share, and what runs have gathered.
  WeightMemory shared_weights() const { return sharded_ == nullptr ? WeightMemory() : sharded_->memory(); }
  void ForgetSpeed();  // soon: the next start measures it
  bool lost() const;   // a device has failed for good: no run will go well in this process

 private:
  RankHost(EmbeddedPool pool, std::unique_ptr<ShardedWeights> sharded, std::unique_ptr<DataPlane> data_plane,
           v1::ModelId model_id, int64_t kv_budget_bytes, std::string speed_profile_path, Listener& listener);
  void Post(std::function<void()> work);
  void Work();  // the host's thread
  absl::StatusOr<std::vector<std::string>> PrepareNow(WorkerMachine::RunPart part);
  // That of a new run; null: it shares no pass. INTERNAL: others say otherwise how many do.
  absl::StatusOr<std::shared_ptr<RankPack>> PackOf(const WorkerMachine::RunPart& part);
  void EndRun(uint64_t run);
  void AbortAll();
  bool IsStopping(uint64_t run) const;
  void MakeRoom();  // for the runs that live, where a share of the weights that none uses has it
  void LogRejectedPeers(int rank, int rejected);        // once
  std::shared_ptr<ActiveRun> Find(uint64_t run) const;  // null: unknown, or over
  std::vector<std::shared_ptr<ActiveRun>> Runs() const;

  const EmbeddedPool pool_;
  const std::unique_ptr<ShardedWeights> sharded_;  // null: they are not
  const std::unique_ptr<DataPlane> data_plane_;
  const v1::ModelId model_id_;
  HeldKv kv_;
  const std::string speed_profile_path_;  // Options::speed_profile_path
  Listener& listener_;
  // By epoch, number and rank; used on the host's thread alone.
  std::map<std::tuple<uint64_t, uint64_t, int>, std::weak_ptr<RankPack>> packs_;
  std::atomic<bool> rejected_peers_logged_{false};
  std::atomic<bool> lost_{false};

  mutable Mutex mu_;
  CondVar posted_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mu_);
  bool quit_ ABSL_GUARDED_BY(mu_) = false;
  std::set<uint64_t> stopping_ ABSL_GUARDED_BY(mu_);  // runs that were told to stop and have not
  // By number. Shared: Stop and progress read a run while it ends. What it holds goes on the host's thread.
  std::map<uint64_t, std::shared_ptr<ActiveRun>> runs_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_RANK_HOST_H_
