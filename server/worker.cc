#include "server/worker.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/devices/engine_options.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/config/config.h"
#include "server/observe/log.h"
#include "server/pool/control_client.h"
#include "server/pool/leader.h"
#include "server/pool/rank_host.h"
#include "server/pool/worker_machine.h"
#include "server/shutdown_signals.h"

namespace meshfill {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(50);

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

RankHost::Options HostOptions(const v1::Config& config) {
  const v1::PoolSection::Worker& worker = config.pool().worker();
  return {.model_path = config.model().path(),
          .dtype = ToEngineOptions(config).dtype,
          .device = ParseDevice(worker.device()).value(),  // one of the names: LoadConfig checked it
          .ranks = static_cast<int>(worker.ranks()),
          .threads = static_cast<int>(worker.threads()),
          .peak_flops = worker.peak_flops(),
          .memory_bytes = static_cast<int64_t>(worker.memory_bytes()),
          .data_listen = worker.data_listen(),
          .nccl_ctas = static_cast<int>(worker.nccl_ctas()),
          .attention_sm_margin = static_cast<int>(worker.attention_sm_margin()),
          .speed_profile_path = ToEngineOptions(config).speed_profile_path};
}

v1::Join MakeOffer(const v1::Config& config, const RankHost& host) {
  const v1::PoolSection::Worker& worker = config.pool().worker();
  v1::Join offer;
  offer.set_protocol(kControlProtocol);
  offer.set_build(absl::StrCat("meshfill ", MESHFILL_VERSION));
  offer.set_name(worker.name().empty() ? HostName() : worker.name());
  offer.set_host(worker.host().empty() ? HostName() : worker.host());
  host.Describe(offer);
  return offer;
}

// Binds the state machine to a control stream, a rank host and the time. One mutex guards the machine, whose
// actions are carried out under it in their order; all of them only queue.
class WorkerProcess final : private ControlClient::Listener, private RankHost::Listener {
 public:
  ~WorkerProcess() override {
    client_.reset();  // both call back in
    host_.reset();
  }

  absl::Status Start(const v1::Config& config, const std::string& join) {
    ASSIGN_OR_RETURN(auto client, ControlClient::Make(join, config.pool().tls(), *this));
    client_ = std::move(client);
    ASSIGN_OR_RETURN(auto host, RankHost::Load(HostOptions(config), *this));
    host_ = std::move(host);
    const v1::Join offer = MakeOffer(config, *host_);
    Log(absl::StrCat("loaded model ", offer.model().name(), ": ", offer.ranks(), " ranks of ",
                     offer.backend(), "; joining ", join, " as ", LogQuote(offer.name())));
    const MutexLock lock(mu_);
    // The leader, who hears of all workers, notices first where the network is at fault.
    const absl::Duration silence_timeout = 2 * ToDuration(config.pool().silence_timeout());
    machine_.emplace(WorkerMachine::Options{.offer = offer, .silence_timeout = silence_timeout});
    machine_->Start(MonotonicNow());
    return absl::OkStatus();
  }

  // Some, once the worker is done.
  std::optional<absl::Status> Tick() {
    if (host_->lost()) {
      return absl::UnavailableError(
          "a GPU of this worker has failed; start the worker anew, or see what the driver says");
    }
    const std::vector<WorkerMachine::RankProgress> progress = host_->progress();
    const MutexLock lock(mu_);
    machine_->OnTick(MonotonicNow(), progress);
    DoActions();
    return exit_;
  }

  void Drain() {
    const MutexLock lock(mu_);
    machine_->Drain(MonotonicNow());
    DoActions();
  }

 private:
  void OnMessage(ControlClient::Connection connection, const v1::LeaderMessage& message) override {
    const MutexLock lock(mu_);
    machine_->OnMessage(connection, message, MonotonicNow());
    DoActions();
  }
  void OnDisconnected(ControlClient::Connection connection, const absl::Status& why) override {
    const MutexLock lock(mu_);
    machine_->OnDisconnected(connection, why, MonotonicNow());
    DoActions();
  }
  void OnRunPrepared(uint64_t run, absl::StatusOr<std::vector<std::string>> addresses) override {
    const MutexLock lock(mu_);
    machine_->OnRunPrepared(run, std::move(addresses));
    DoActions();
  }
  void OnRankDone(uint64_t run, int rank, absl::StatusOr<RankOutput> output) override {
    if (host_->lost()) return;  // the leader hears of it once: by the end of this process
    const MutexLock lock(mu_);
    machine_->OnRankDone(run, rank, std::move(output));
    DoActions();
  }
  void OnRunStopped(uint64_t run) override {
    const MutexLock lock(mu_);
    machine_->OnRunStopped(run, MonotonicNow());
    DoActions();
  }

  void DoActions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (WorkerMachine::Action& action : machine_->TakeActions()) {
      if (auto* connect = std::get_if<WorkerMachine::Connect>(&action)) {
        client_->Connect(connect->connection);
      } else if (auto* disconnect = std::get_if<WorkerMachine::Disconnect>(&action)) {
        client_->Disconnect(disconnect->connection);
      } else if (auto* send = std::get_if<WorkerMachine::Send>(&action)) {
        client_->Send(std::move(send->message));
      } else if (auto* prepare = std::get_if<WorkerMachine::PrepareRun>(&action)) {
        host_->Prepare(std::move(prepare->part));
      } else if (auto* start = std::get_if<WorkerMachine::StartRun>(&action)) {
        host_->Start(start->run, std::move(start->addresses), std::move(start->probes));
      } else if (auto* stop = std::get_if<WorkerMachine::StopRun>(&action)) {
        host_->Stop(stop->run, stop->reason);
      } else if (auto* release = std::get_if<WorkerMachine::ReleaseRun>(&action)) {
        host_->Release(release->run);
      } else if (auto* exit = std::get_if<WorkerMachine::Exit>(&action)) {
        exit_ = exit->status;
      } else if (auto* line = std::get_if<WorkerMachine::LogLine>(&action)) {
        Log(line->text);
      }
    }
  }

  std::unique_ptr<ControlClient> client_;
  std::unique_ptr<RankHost> host_;
  Mutex mu_;
  std::optional<WorkerMachine> machine_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> exit_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::Status RunWorker(const v1::Config& config, const std::string& join) {
  if (config.model().path().empty()) {
    return absl::InvalidArgumentError("config: model.path: not set; name a Hugging Face folder");
  }
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);  // statuses tell all of it
  ShutdownSignals signals;
  WorkerProcess worker;
  RETURN_IF_ERROR(worker.Start(config, join));
  bool draining = false;
  while (true) {
    if (const std::optional<absl::Status> exit = worker.Tick()) {
      Log("stopped");
      return *exit;
    }
    if (!signals.Wait(kTick)) continue;
    if (draining) return absl::CancelledError("stopped by a second signal");
    draining = true;
    Log("draining: the run that this worker takes part in finishes; a second signal stops at once");
    worker.Drain();
  }
}

}  // namespace meshfill
