#include "server/pool/worker/rank_host.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/kv_budget.h"
#include "engine/model/model_tensors.h"
#include "engine/speed/pool_profile.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"
#include "server/observe/pool_log.h"
#include "server/pool/model_id.h"
#include "server/pool/offered_speed.h"
#include "server/pool/worker/active_run.h"
#include "server/pool/worker/rank_pack.h"

namespace meshfill {

RankHost::RankHost(EmbeddedPool pool, std::unique_ptr<ShardedWeights> sharded,
                   std::unique_ptr<DataPlane> data_plane, v1::ModelId model_id, int64_t kv_budget_bytes,
                   std::string speed_profile_path, Listener& listener)
    : pool_(std::move(pool)),
      sharded_(std::move(sharded)),
      data_plane_(std::move(data_plane)),
      model_id_(std::move(model_id)),
      kv_(KvShapeOf(pool_.models.front()->shape()), kv_budget_bytes, MonotonicNow, KvMemoryOfDevices(pool_)),
      speed_profile_path_(std::move(speed_profile_path)),
      listener_(listener),
      thread_([this] { Work(); }) {}

absl::StatusOr<std::unique_ptr<RankHost>> RankHost::Load(const Options& options, Listener& listener) {
  ASSIGN_OR_RETURN(EmbeddedPool pool,
                   LoadEmbeddedPool({.model_path = options.model_path,
                                     .ranks = options.ranks,
                                     .device = options.device,
                                     .dtype = options.dtype,
                                     .weights = options.weights,
                                     .of_worker = true,
                                     .may_share = options.may_share,
                                     .peak_flops = options.peak_flops,
                                     .memory_budget_bytes = options.memory_bytes,
                                     .kv_memory_bytes = options.kv_memory_bytes,
                                     .communication_multiprocessors = options.attention_sm_margin,
                                     .devices = options.devices,
                                     .threads = options.threads,
                                     .speed_profile_path = options.speed_profile_path,
                                     .measure_speed = options.measure_speed},
                                    LogPoolNote));
  ASSIGN_OR_RETURN(
      std::unique_ptr<DataPlane> data_plane,
      pool.hardware->MakeDataPlane(
          {.listen = options.data_listen, .encrypt = options.encrypt, .nccl_ctas = options.nccl_ctas}));
  ASSIGN_OR_RETURN(auto identified, IdentifyModel(options.model_path, pool.models.front()->shape().dtype));
  const int64_t kv_budget_bytes = KvBudgetBytes(pool, options.kv_memory_bytes, options.kv_host_memory_bytes);
  std::unique_ptr<ShardedWeights> sharded;
  const bool must_share = pool.capacity.weights.mode == WeightMode::kSharded && pool.peers == nullptr;
  if (must_share || pool.capacity.shared_weights.has_value()) {
    auto made = ShardedWeights::Make(*pool.models.front()->tensors(), *pool.devices.front());
    if (!made.ok() && (must_share || !absl::IsUnimplemented(made.status()))) return made.status();
    if (made.ok()) {
      sharded = *std::move(made);
    } else {
      pool.capacity.shared_weights.reset();
    }
  }
  return std::unique_ptr<RankHost>(new RankHost(std::move(pool), std::move(sharded), std::move(data_plane),
                                                std::move(identified.id), kv_budget_bytes,
                                                options.speed_profile_path, listener));
}

RankHost::~RankHost() {
  {
    const MutexLock lock(mu_);
    quit_ = true;
    posted_.NotifyAll();
  }
  AbortAll();
  thread_.join();
  AbortAll();  // what the thread began meanwhile
}

void RankHost::AbortAll() {
  for (const auto& run : Runs()) run->Abort(absl::CancelledError("the worker exits"));
}

void RankHost::Describe(v1::Join& offer) const {
  offer.set_backend(pool_.devices.front()->name());
  offer.set_ranks(static_cast<uint32_t>(pool_.devices.size()));
  for (const std::string& name : pool_.device_names) offer.add_devices(name);
  offer.set_memory_bytes(static_cast<uint64_t>(pool_.capacity.memory_budget_bytes));
  offer.set_kv_memory_bytes(static_cast<uint64_t>(kv_.budget_bytes()));
  offer.set_data_plane(data_plane_->kind());
  offer.set_messages_mix(data_plane_->messages_mix());
  offer.set_many_messages(data_plane_->many_messages());
  offer.set_rows_independent(std::all_of(pool_.devices.begin(), pool_.devices.end(),
                                         [](const auto& device) { return device->rows_are_independent(); }));
  offer.set_kv_on_host(!pool_.hardware->in_host_memory());
  offer.set_peak_flops(pool_.peak_flops);
  *offer.mutable_model() = model_id_;
  *offer.mutable_speed() = ToProto(pool_.capacity.speed);
  PlanWeights weights = pool_.capacity.weights;
  // Its devices have them together. For the others they come to it as weights do that stream.
  if (pool_.peers != nullptr) weights.mode = WeightMode::kStreamed;
  *offer.mutable_weights() = ToProto(weights);
  if (pool_.capacity.shared_weights.has_value()) {
    *offer.mutable_shared_weights() = ToProto(*pool_.capacity.shared_weights);
  }
  if (sharded_ != nullptr) offer.set_weight_layout(sharded_->layout());
}

void RankHost::ForgetSpeed() {
  if (speed_profile_path_.empty()) return;
  Post([this] {
    const std::string key = pool_.hardware->SpeedKey(pool_.models.front()->shape(), pool_.devices);
    const absl::Status forgotten = ForgetPoolSpeed(speed_profile_path_, key);
    LogPoolNote(forgotten.ok() ? absl::StrCat("the pool's speed is wrong: this worker's is dropped from ",
                                              speed_profile_path_, ", and its next start measures it")
                               : absl::StrCat("the pool's speed is wrong: ", forgotten.message(),
                                              "; start the worker with --set plan.measure=true"),
                /*warning=*/true);
  });
}

void RankHost::Post(std::function<void()> work) {
  const MutexLock lock(mu_);
  work_.push_back(std::move(work));
  posted_.NotifyAll();
}

void RankHost::Work() {
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(mu_);
      while (!quit_ && work_.empty()) posted_.Wait(mu_);
      if (quit_) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

void RankHost::LogRejectedPeers(int rank, int rejected) {
  if (rejected == 0 || rejected_peers_logged_.exchange(true)) return;
  Log(absl::StrCat("refused ", rejected, " connections to the data port of rank ", rank,
                   ": they did not say the hello of a peer; later ones are not logged"),
      {.level = LogLevel::kWarning});
}

std::shared_ptr<ActiveRun> RankHost::Find(uint64_t run) const {
  const MutexLock lock(mu_);
  const auto entry = runs_.find(run);
  return entry != runs_.end() ? entry->second : nullptr;
}

std::vector<std::shared_ptr<ActiveRun>> RankHost::Runs() const {
  const MutexLock lock(mu_);
  std::vector<std::shared_ptr<ActiveRun>> runs;
  for (const auto& [number, run] : runs_) runs.push_back(run);
  return runs;
}

void RankHost::Prepare(WorkerMachine::RunPart part) {
  Post([this, part = std::move(part)]() mutable {
    const uint64_t run = part.number;
    listener_.OnRunPrepared(run, PrepareNow(std::move(part)));
  });
}

absl::StatusOr<std::vector<std::string>> RankHost::PrepareNow(WorkerMachine::RunPart part) {
  const uint64_t number = part.number;
  ActiveRun::Events events{
      .on_rank_done =
          [this, number](int seat, auto output) {
            if (lost_) return;  // the end of this process tells the leader
            listener_.OnRankDone(number, seat, std::move(output));
          },
      .on_still =
          [this, number](uint64_t pause) {
            listener_.OnRunPaused(number, pause, /*messages=*/0, /*still=*/true);
          },
      .on_strangers = [this](int rank, int strangers) { LogRejectedPeers(rank, strangers); }};
  absl::StatusOr<std::shared_ptr<RankPack>> pack = PackOf(part);
  auto run = std::make_shared<ActiveRun>(std::move(part),
                                         ActiveRun::Worker{pool_, sharded_.get(), *data_plane_, kv_, lost_},
                                         std::move(events), pack.ok() ? *pack : nullptr);
  {
    const MutexLock lock(mu_);
    runs_[run->number()] = run;
    if (stopping_.contains(run->number())) return absl::CancelledError("stopped before it was prepared");
  }
  RETURN_IF_ERROR(pack.status());
  RETURN_IF_ERROR(run->CheckWeights());
  if (!run->SharesWeights()) MakeRoom();
  RETURN_IF_ERROR(run->Reserve());
  RETURN_IF_ERROR(run->BeginKv());
  RETURN_IF_ERROR(run->OpenStreams());
  return run->Listen();
}

absl::StatusOr<std::shared_ptr<RankPack>> RankHost::PackOf(const WorkerMachine::RunPart& part) {
  std::erase_if(packs_, [](const auto& each) { return each.second.expired(); });
  if (!part.pack.has_value()) return nullptr;
  std::weak_ptr<RankPack>& held = packs_[{part.epoch, part.pack->number, part.local_rank}];
  std::shared_ptr<RankPack> pack = held.lock();
  if (pack == nullptr) {
    held = pack = std::make_shared<RankPack>(pool_, part.local_rank, part.pack->runs);
  } else if (pack->runs() != part.pack->runs) {
    return absl::InternalError(absl::StrCat("the leader lets ", part.pack->runs, " runs share pass ",
                                            part.pack->number, ", and said ", pack->runs(), " before"));
  }
  return pack;
}

// The leader counts the shares of the runs that live alone.
void RankHost::MakeRoom() {
  const int64_t budget = pool_.capacity.memory_budget_bytes;
  if (sharded_ == nullptr || budget == 0) return;
  int64_t needed = sharded_->memory().bytes;
  for (const auto& run : Runs()) needed += run->reserve_bytes();
  if (needed > budget) sharded_->DropUnused();
}

void RankHost::Start(uint64_t run, std::vector<std::string> addresses, std::vector<LinkProbe> probes) {
  Post([this, run, addresses = std::move(addresses), probes = std::move(probes)]() mutable {
    if (IsStopping(run)) return;  // its Stop comes next
    if (auto current = Find(run)) current->Start(std::move(addresses), std::move(probes));
  });
}

void RankHost::Pause(uint64_t run, uint64_t number) {
  const auto current = Find(run);
  if (current == nullptr) return;
  const int64_t messages = current->Pause(number);
  if (number == 0) return;
  Post([this, run, number, messages] { listener_.OnRunPaused(run, number, messages, /*still=*/false); });
}

void RankHost::PauseAt(uint64_t run, uint64_t number, int64_t messages) {
  Post([this, run, number, messages] {
    if (auto current = Find(run)) current->PauseAt(number, messages);
  });
}

void RankHost::Resume(uint64_t run) {
  if (auto current = Find(run)) current->Resume();
}

void RankHost::Stop(uint64_t run, const std::string& reason) {
  {
    const MutexLock lock(mu_);
    stopping_.insert(run);
  }
  if (auto current = Find(run)) current->Abort(absl::AbortedError(reason));
  Post([this, run] {
    EndRun(run);
    kv_.Drop(run);
    {
      const MutexLock lock(mu_);
      stopping_.erase(run);
    }
    listener_.OnRunStopped(run);
  });
}

void RankHost::EndKv(const std::string& lease) {
  Post([this, lease] { kv_.Ends(lease); });
}

void RankHost::EndKvRun(uint64_t run) {
  Post([this, run] { kv_.RunEnds(run); });
}

void RankHost::EndAllKv() {
  Post([this] { kv_.EndAll(); });
}

void RankHost::Release(uint64_t run) {
  Post([this, run] {
    kv_.Keep(run);
    EndRun(run);
  });
}

// Waits for the ranks, then frees what they held.
void RankHost::EndRun(uint64_t run) {
  std::shared_ptr<ActiveRun> current = Find(run);
  if (current == nullptr) return;
  current->Join();
  current->End();
  {
    const MutexLock lock(mu_);
    runs_.erase(run);
  }
  data_plane_->End(current->data_plane_run());
}

bool RankHost::IsStopping(uint64_t run) const {
  const MutexLock lock(mu_);
  return stopping_.contains(run);
}

bool RankHost::lost() const { return lost_; }

WorkerMachine::ProgressOfRuns RankHost::progress() const {
  WorkerMachine::ProgressOfRuns progress;
  for (const auto& run : Runs()) progress[run->number()] = run->progress();
  return progress;
}

}  // namespace meshfill
