// The leader of a pool of worker processes as a prefill engine: what the queue and the front-end call.
//
// Threads: gRPC's (the control streams' events), a clock's of its own, and the callers'. One mutex guards the
// leader's state machine, whose actions are carried out under it in their order; all of them only queue.
// Observers are called from the thread that waits for the prefill, without the mutex.
#ifndef MESHFILL_SERVER_POOL_POOL_ENGINE_H_
#define MESHFILL_SERVER_POOL_POOL_ENGINE_H_

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/engine_options.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_engine.h"
#include "engine/run_places.h"
#include "kernels/mutex.h"
#include "meshfill/v1/config.pb.h"
#include "server/observe/metrics.h"
#include "server/pool/control_service.h"
#include "server/pool/leader.h"
#include "server/pool/model_id.h"
#include "server/pool/pool_kv_leases.h"

namespace meshfill {

class PoolEngine final : public PrefillEngine, private ControlService::Listener {
 public:
  // Reads the model's config and listens on pool.control_listen. `config` comes from LoadConfig; `metrics`
  // outlives the engine. Errors: those of IdentifyModel and of ControlService::Start.
  static absl::StatusOr<std::unique_ptr<PoolEngine>> Listen(const v1::Config& config, Metrics& metrics);
  ~PoolEngine() override;

  const std::string& control_address() const { return control_->address(); }
  KvLeases& kv_leases() { return kv_leases_; }  // on what the workers keep

  const ModelShape& model() const override { return model_.shape; }
  const std::string& model_name() const override { return model_.id.name(); }
  const std::string& backend_name() const override { return backend_name_; }
  int ranks() const override;
  double peak_flops() const override;
  int capacity() const override { return kLiveRuns; }
  std::vector<PoolMember> members() const override;
  std::vector<PoolLink> links() const override;

  // UNAVAILABLE: no workers.
  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const override;
  std::vector<SubmeshSeconds> Submeshes(int64_t tokens, const PrefillOptions& options) const override;
  int64_t CachedTokens(int64_t tokens, const PrefillOptions& options) const override;
  // K and V are kept by the workers, under `kv_lease` of the options: their sink stays empty. Wait's errors,
  // too: UNAVAILABLE: the pool is empty or breaks again and again. INTERNAL: a request that ended two epochs.
  absl::StatusOr<std::unique_ptr<Prefill>> Start(const PrefillRequest& request,
                                                 PrefillObserver* observer) override;

  // Each prompt is computed whole by one rank of a worker, behind nothing that is cached.
  PackRoom pack_room() const override;
  PackShare ShareOfPack(int64_t tokens, const PrefillOptions& options) const override;
  absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> StartPack(
      std::span<const PrefillRequest> requests, std::span<PrefillObserver* const> observers) override;

 private:
  class Run;  // pool_run.h

  static constexpr absl::Duration kTick = absl::Milliseconds(50);
  static constexpr absl::Duration kStoodStill =
      absl::Milliseconds(250);  // a tick that late: this process did not run

  PoolEngine(const v1::Config& config, IdentifiedModel model, std::unique_ptr<HolderChannels> holders,
             Metrics& metrics);

  void OnConnected(ControlService::Connection connection) override;
  void OnMessage(ControlService::Connection connection, const v1::WorkerMessage& message) override;
  void OnDisconnected(ControlService::Connection connection) override;

  void Tick();  // the clock's thread
  void DoActions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Do(Leader::Send& send) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Do(Leader::Close& close) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Do(Leader::Answer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Do(Leader::LayersDone& done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Do(Leader::LogLine& line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Learn(const Prediction& predicted, const MeasuredSeconds& measured) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What the directory has, if it has changed. Its cost grows with the leases: once in a tick, not at each
  // event.
  void PublishKv() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PublishMetrics() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Check(const PrefillRequest& request) const;
  // RESOURCE_EXHAUSTED: as many live as may, of whom a pack is one.
  absl::Status CheckRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The prompt on one rank, behind nothing that is cached. Nothing: it shares no pass.
  std::optional<PlanChoice> PlanOnRank(const std::optional<PoolCapacity>& rank, int64_t tokens,
                                       const PrefillOptions& options) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  PackShare ShareOf(const PlanChoice& on_rank, const PoolCapacity& rank) const;
  PackRoom MeasurePackRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<PlanChoice> PlanFor(const PoolCapacity& capacity, int64_t tokens,
                                     const PrefillOptions& options, const CachedPrefix& cached) const;

  const IdentifiedModel model_;
  const EngineOptions defaults_;
  SpeedCorrection correction_;
  const std::string backend_name_ = "pool";
  Metrics& metrics_;

  mutable Mutex mu_;
  CondVar changed_;
  Leader leader_ ABSL_GUARDED_BY(mu_);
  PackRoom pack_room_ ABSL_GUARDED_BY(mu_);  // where nothing lives
  // Who had joined, and how many of them stayed, when rooms for packs and short prompts were measured: each
  // change of the pool changes this.
  std::pair<uint64_t, int> rooms_of_ ABSL_GUARDED_BY(mu_) = {0, 0};
  uint64_t last_pack_ ABSL_GUARDED_BY(mu_) = 0;         // of runs_
  bool speeds_forgotten_ ABSL_GUARDED_BY(mu_) = false;  // since they are wrong
  // The directory's version when observers were told last, and when its metrics were published.
  uint64_t kv_version_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t published_kv_version_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<Leader::Ticket, Run*> runs_ ABSL_GUARDED_BY(mu_);  // live runs; each leaves before its end
  bool quit_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<ControlService> control_;  // set once, under mu_
  std::thread clock_;
  PoolKvLeases kv_leases_;  // last: it waits for calls that use all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_POOL_ENGINE_H_
