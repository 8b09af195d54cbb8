// A worker of a pool: its state machine bound to a control stream, to the ranks that compute, to the port at
// which it serves what they keep, and to the time.
#ifndef MESHFILL_SERVER_POOL_WORKER_WORKER_PROCESS_H_
#define MESHFILL_SERVER_POOL_WORKER_WORKER_PROCESS_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_store.h"
#include "meshfill/v1/config.pb.h"
#include "server/observe/worker_metrics.h"

namespace meshfill {

class WorkerProcess {
 public:
  static constexpr absl::Duration kTick = absl::Milliseconds(50);

  // Loads the model, and joins the leader at `join`, HOST:PORT. Errors: those of ControlClient::Make,
  // RankHost::Load and HolderService::Start.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(const v1::Config& config,
                                                              const std::string& join);
  ~WorkerProcess();  // leaves without a word

  // Every kTick, from one thread. The status to exit with, once the worker is done.
  std::optional<absl::Status> Tick();
  // The run that it takes part in finishes, and it leaves once its leases have ended.
  void Drain();
  std::string standstill();    // what Liveness::Beat wants to know of its ranks; call as often as Tick
  KvStore::Counts kv() const;  // what its ranks keep
  WorkerLoad load() const;

 private:
  class Impl;
  explicit WorkerProcess(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_WORKER_PROCESS_H_
