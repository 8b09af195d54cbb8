#include "server/pool/worker/worker_process.h"

#include <unistd.h>

#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "engine/engine_options.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/config/address.h"
#include "server/config/config.h"
#include "server/config/config_units.h"
#include "server/observe/build_name.h"
#include "server/observe/liveness.h"
#include "server/observe/log.h"
#include "server/pool/membership.h"
#include "server/pool/worker/control_client.h"
#include "server/pool/worker/holder_service.h"
#include "server/pool/worker/rank_host.h"
#include "server/pool/worker/run_watch.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill {
namespace {

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

RankHost::Options HostOptions(const v1::Config& config) {
  const v1::PoolSection::Worker& worker = config.pool().worker();
  return {.model_path = config.model().path(),
          .dtype = ToEngineOptions(config).dtype,
          .weights = ToEngineOptions(config).weights,
          .may_share = !ToEngineOptions(config).weights.has_value(),
          .device = worker.device(),
          .ranks = static_cast<int>(worker.ranks()),
          .threads = static_cast<int>(worker.threads()),
          .peak_flops = worker.peak_flops(),
          .memory_bytes = static_cast<int64_t>(worker.memory_bytes()),
          .kv_memory_bytes = ToEngineOptions(config).kv_memory_bytes,
          .kv_host_memory_bytes = ToEngineOptions(config).kv_host_memory_bytes,
          .data_listen = worker.data_listen(),
          .encrypt = config.pool().encrypt(),
          .nccl_ctas = static_cast<int>(worker.nccl_ctas()),
          .attention_sm_margin = static_cast<int>(worker.attention_sm_margin()),
          .devices = ParseDeviceNumbers(worker.devices()).value(),  // the config was checked
          .speed_profile_path = ToEngineOptions(config).speed_profile_path,
          .measure_speed = config.plan().measure()};
}

// The address where K and V are served.
std::string KvListen(const v1::Config& config) {
  const std::string& data_listen = config.pool().worker().data_listen();
  if (!config.kv().listen().empty()) return config.kv().listen();
  return HostPort{.host = data_listen, .port = 0}.DebugString();
}

v1::Join MakeOffer(const v1::Config& config, const RankHost& host, const HolderService& holder) {
  const v1::PoolSection::Worker& worker = config.pool().worker();
  v1::Join offer;
  offer.set_protocol(kControlProtocol);
  offer.set_build(kBuildName);
  offer.set_name(worker.name().empty() ? HostName() : worker.name());
  offer.set_host(worker.host().empty() ? HostName() : worker.host());
  offer.set_kv_address(holder.address());
  offer.set_encrypt(config.pool().encrypt());
  host.Describe(offer);
  return offer;
}

}  // namespace

// One mutex guards the machine, whose actions are carried out under it in their order; all of them only
// queue.
class WorkerProcess::Impl final : private ControlClient::Listener, private RankHost::Listener {
 public:
  ~Impl() override {
    {
      const MutexLock lock(mu_);
      closing_ = true;  // what the two call from now on changes nothing
    }
    client_.reset();
    holder_.reset();
    host_.reset();
  }

  absl::Status Start(const v1::Config& config, const std::string& join) {
    ASSIGN_OR_RETURN(auto client, ControlClient::Make(join, config.pool().tls(), *this));
    client_ = std::move(client);
    ASSIGN_OR_RETURN(auto host, RankHost::Load(HostOptions(config), *this));
    host_ = std::move(host);
    absl::StatusOr<std::unique_ptr<HolderService>> holder =
        HolderService::Start(KvListen(config), config, host_->kv());
    if (!holder.ok()) {
      return absl::Status(holder.status().code(), absl::StrCat("kv.listen: ", holder.status().message()));
    }
    holder_ = *std::move(holder);
    Log(absl::StrCat("K and V are served at ", holder_->address()));
    const v1::Join offer = MakeOffer(config, *host_, *holder_);
    Log(absl::StrCat("loaded model ", offer.model().name(), ": ", RanksText(offer.ranks()), " of ",
                     offer.backend(), "; joining ", join, " as ", LogQuote(offer.name())));
    const MutexLock lock(mu_);
    machine_.emplace(WorkerMachine::Options{.offer = offer,
                                            .silence_timeout = ToDuration(config.pool().silence_timeout()),
                                            .drain_timeout = ToDuration(config.limits().drain_timeout())},
                     [this] { return host_->progress(); });
    machine_->Start(MonotonicNow());
    return absl::OkStatus();
  }

  // The status to exit with, once the worker is done.
  std::optional<absl::Status> Tick() {
    if (host_->lost()) {
      return absl::UnavailableError(
          "a device of this worker has failed; start the worker anew, or see what the driver says");
    }
    Handle([](WorkerMachine& machine) { machine.OnTick(MonotonicNow()); });
    const MutexLock lock(mu_);
    return exit_;
  }

  std::string standstill() {
    const WorkerMachine::ProgressOfRuns progress = host_->progress();
    const MutexLock lock(mu_);
    return watch_.Look(progress, MonotonicNow());
  }

  KvStore::Counts kv() const { return host_->kv().counts(); }
  WorkerLoad load() const {
    const KvStore::Counts kept = kv();
    const int runs = static_cast<int>(host_->progress().size());
    const MutexLock lock(mu_);
    return {.member = member_,
            .runs = runs,
            .kv_leases = kept.leases,
            .kv_bytes = kept.bytes,
            .kv_max_bytes = host_->kv().budget_bytes(),
            .shared_weight_bytes = host_->shared_weights().bytes};
  }
  void Drain() {
    Handle([](WorkerMachine& machine) { machine.Drain(MonotonicNow()); });
  }

 private:
  void OnMessage(ControlClient::Connection connection, const v1::LeaderMessage& message) override {
    Handle([&](WorkerMachine& machine) { machine.OnMessage(connection, message, MonotonicNow()); });
  }
  void OnDisconnected(ControlClient::Connection connection, const absl::Status& why) override {
    Handle([&](WorkerMachine& machine) { machine.OnDisconnected(connection, why, MonotonicNow()); });
  }
  void OnRunPrepared(uint64_t run, absl::StatusOr<std::vector<std::string>> addresses) override {
    Handle([&](WorkerMachine& machine) { machine.OnRunPrepared(run, std::move(addresses)); });
  }
  void OnRankDone(uint64_t run, int rank, absl::StatusOr<RankOutput> output) override {
    Handle([&](WorkerMachine& machine) { machine.OnRankDone(run, rank, std::move(output)); });
  }
  void OnRunPaused(uint64_t run, uint64_t pause, int64_t messages, bool still) override {
    Handle([&](WorkerMachine& machine) { machine.OnRunPaused(run, pause, messages, still); });
  }
  void OnRunStopped(uint64_t run) override {
    Handle([&](WorkerMachine& machine) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      watch_.End(run);
      machine.OnRunStopped(run, MonotonicNow());
    });
  }

  // The machine hears of an event, and what it wants is done.
  template <typename Event>
  void Handle(Event event) {
    const MutexLock lock(mu_);
    if (closing_) return;
    event(*machine_);
    DoActions();
    if (machine_->member() != member_) holder_->SetMember(member_ = machine_->member());
  }

  void DoActions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (WorkerMachine::Action& action : machine_->TakeActions()) {
      watch_.Hear(action, host_->layers());
      std::visit([this](auto& each) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { Do(each); }, action);
    }
  }
  void Do(WorkerMachine::Connect& connect) { client_->Connect(connect.connection); }
  void Do(WorkerMachine::Disconnect& disconnect) { client_->Disconnect(disconnect.connection); }
  void Do(WorkerMachine::Send& send) { client_->Send(std::move(send.message)); }
  void Do(WorkerMachine::PrepareRun& prepare) { host_->Prepare(std::move(prepare.part)); }
  void Do(WorkerMachine::StartRun& start) {
    host_->Start(start.run, std::move(start.addresses), std::move(start.probes));
  }
  void Do(WorkerMachine::PauseRun& pause) { host_->Pause(pause.run, pause.number); }
  void Do(WorkerMachine::PauseRunAt& pause) { host_->PauseAt(pause.run, pause.number, pause.messages); }
  void Do(WorkerMachine::ResumeRun& resume) { host_->Resume(resume.run); }
  void Do(WorkerMachine::StopRun& stop) { host_->Stop(stop.run, stop.reason); }
  void Do(WorkerMachine::ReleaseRun& release) { host_->Release(release.run); }
  void Do(WorkerMachine::KvLasts& kv) { host_->kv().Lasts(kv.lease, kv.lasts); }
  void Do(WorkerMachine::KvEnds& kv) { host_->EndKv(kv.lease); }
  void Do(WorkerMachine::KvRunEnds& kv) { host_->EndKvRun(kv.run); }
  void Do(WorkerMachine::AllKvEnds&) { host_->EndAllKv(); }
  void Do(WorkerMachine::ForgetSpeed&) { host_->ForgetSpeed(); }
  void Do(WorkerMachine::Exit& exit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { exit_ = exit.status; }
  void Do(WorkerMachine::LogLine& line) { Log(line.text, {.level = line.level}); }

  std::unique_ptr<ControlClient> client_;
  std::unique_ptr<RankHost> host_;
  std::unique_ptr<HolderService> holder_;  // serves what the host keeps
  mutable Mutex mu_;
  std::optional<WorkerMachine> machine_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> exit_ ABSL_GUARDED_BY(mu_);
  bool member_ ABSL_GUARDED_BY(mu_) = false;  // whether it is in a pool, as health says
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  RunWatch watch_ ABSL_GUARDED_BY(mu_);  // of the runs that the host has
};

WorkerProcess::WorkerProcess(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WorkerProcess::~WorkerProcess() = default;

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(const v1::Config& config,
                                                                    const std::string& join) {
  auto impl = std::make_unique<Impl>();
  RETURN_IF_ERROR(impl->Start(config, join));
  return std::unique_ptr<WorkerProcess>(new WorkerProcess(std::move(impl)));
}

std::optional<absl::Status> WorkerProcess::Tick() { return impl_->Tick(); }
std::string WorkerProcess::standstill() { return impl_->standstill(); }
void WorkerProcess::Drain() { impl_->Drain(); }
KvStore::Counts WorkerProcess::kv() const { return impl_->kv(); }
WorkerLoad WorkerProcess::load() const { return impl_->load(); }

}  // namespace meshfill
