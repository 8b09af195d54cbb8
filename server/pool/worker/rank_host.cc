#include "server/pool/worker/rank_host.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/comm/message_gate.h"
#include "engine/devices/free_memory.h"
#include "engine/kv_budget.h"
#include "engine/model/model_tensors.h"
#include "engine/run/rank_weights.h"
#include "engine/run/weight_exchange.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"
#include "server/observe/pool_log.h"
#include "server/pool/model_id.h"
#include "server/pool/offered_speed.h"
#include "server/pool/run_plan.h"
#include "server/pool/worker/counting_stream.h"

namespace meshfill {
namespace {

constexpr absl::Duration kReadersLetGo = absl::Milliseconds(500);

}  // namespace

// One run's ranks of this worker, from Prepare to Release or Stop.
class RankHost::ActiveRun {
 public:
  ActiveRun(WorkerMachine::RunPart part, RankHost& host)
      : part_(std::move(part)), host_(host), seats_(part_.shards.size()) {
    if (host_.data_plane_->messages_mix() || part_.plan.ranks() == 1) return;
    gate_ = std::make_unique<MessageGate>(static_cast<int>(seats_.size()),
                                          [this](uint64_t pause) { OnStill(pause); });
  }

  uint64_t number() const { return part_.number; }
  uint64_t data_plane_run() const { return DataPlaneRun(part_.epoch, part_.number, Traffic::kQ); }
  int64_t reserve_bytes() const { return part_.reserve_bytes; }
  bool SharesWeights() const { return part_.weights.share.of > 0; }

  // A leader that counts on other weights than these has been told so by another worker.
  absl::Status CheckWeights() const {
    const WeightMode mode = host_.pool_.models.front()->weight_mode();
    const bool alone = mode != WeightMode::kSharded || host_.pool_.peers != nullptr;
    const bool can = SharesWeights() ? host_.sharded_ != nullptr : alone;
    if (can) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the run's workers ", SharesWeights() ? "share" : "do not share",
                                            " their weights, and this one's are ", WeightModeName(mode)));
  }

  // Holds the memory of the run until its ranks take it, so that a lack of it shows before any rank's first
  // step.
  absl::Status Reserve() {
    const int64_t bytes = part_.reserve_bytes;
    const int64_t free = host_.pool_.hardware->in_host_memory() ? FreeMemoryBytes() : 0;  // 0: not known
    // What lies spare is taken before anything new.
    if (free > 0 && bytes > free + static_cast<int64_t>(SpareMappings::spare_bytes())) {
      return absl::FailedPreconditionError(absl::StrCat("the run needs ", bytes, " bytes of memory, and ",
                                                        free, " are free; shorten the prompt or add ranks"));
    }
    for (size_t i = 0; i < seats_.size(); ++i) {
      ASSIGN_OR_RETURN(BufferRef reservation,
                       host_.pool_.devices[i]->Allocate(static_cast<size_t>(bytes) / seats_.size()));
      reservations_.push_back(std::move(reservation));
    }
    return absl::OkStatus();
  }

  // Where K and V of cached tokens are, and where the others go, from now on, if they are kept.
  absl::Status BeginKv() {
    ASSIGN_OR_RETURN(prefix_, host_.kv_.PrefixOf(part_.prefix));
    if (!part_.keep_kv.has_value()) return absl::OkStatus();
    std::vector<int> ranks;
    for (size_t i = 0; i < seats_.size(); ++i) ranks.push_back(rank(i));
    // The leader counts on the room of what it has given up; a reader holds that for a part more.
    const absl::Time deadline = MonotonicNow() + kReadersLetGo;
    while (true) {
      auto kv = host_.kv_.Begin(part_.number, *part_.keep_kv, prefix_, part_.plan.layout, ranks);
      if (absl::IsResourceExhausted(kv.status()) && MonotonicNow() < deadline) {
        absl::SleepFor(absl::Milliseconds(1));
        continue;
      }
      ASSIGN_OR_RETURN(kv_, std::move(kv));
      return absl::OkStatus();
    }
  }

  // Each rank's stream, from now on: its progress is asked for before it runs.
  absl::Status OpenStreams() {
    for (size_t i = 0; i < seats_.size(); ++i) {
      ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, host_.pool_.devices[i]->NewStream(&stop_));
      seats_[i].stream = std::make_unique<CountingStream>(std::move(stream));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> Listen() {
    std::vector<std::string> addresses;
    for (size_t i = 0; i < seats_.size(); ++i) {
      ASSIGN_OR_RETURN(std::unique_ptr<Endpoint> endpoint, ListenFor(i));
      addresses.push_back(endpoint->address());
      const MutexLock lock(mu_);
      if (!abort_reason_.ok()) return abort_reason_;
      seats_[i].endpoint = std::move(endpoint);
    }
    if (!SharesWeights()) return addresses;
    ASSIGN_OR_RETURN(
        std::unique_ptr<Endpoint> endpoint,
        host_.data_plane_->Listen({.local_rank = 0,
                                   .rank = part_.weights.share.index,
                                   .ranks = part_.weights.share.of,
                                   .epoch = part_.epoch,
                                   .run = DataPlaneRun(part_.epoch, part_.number, Traffic::kGather),
                                   .stop = &stop_}));
    addresses.push_back(endpoint->address());
    const MutexLock lock(mu_);
    if (!abort_reason_.ok()) return abort_reason_;
    weights_endpoint_ = std::move(endpoint);
    return addresses;
  }

  void Start(std::vector<std::string> addresses, std::vector<LinkProbe> probes) {
    addresses_ = std::move(addresses);
    probes_ = std::move(probes);
    reservations_.clear();
    std::vector<bool> reads_head;
    for (size_t i = 0; i < seats_.size(); ++i) {
      reads_head.push_back(ReadsHead(part_.plan, rank(i), part_.tokens_ahead == 0));
    }
    OpenWeights(reads_head);
    started_.store(true, std::memory_order_release);
    ranks_.Start(
        static_cast<int>(seats_.size()), [this](int i) { return RunSeat(i); },
        [this](int i, absl::StatusOr<RankOutput> output) {
          host_.listener_.OnRankDone(part_.number, seat(i), BlameDevice(i, std::move(output)));
        });
  }

  // These three from any thread. Pause answers how many messages have begun.
  int64_t Pause(uint64_t number) {
    const MutexLock lock(pause_mu_);
    pause_ = number;
    if (number > 0 && gate_ != nullptr) return gate_->Close(number);
    stop_.Pause();
    return 0;
  }
  void PauseAt(uint64_t number, int64_t messages) {
    gate_ != nullptr ? gate_->CloseAt(number, messages) : OnStill(number);
  }
  void Resume() {
    {
      const MutexLock lock(pause_mu_);
      pause_ = 0;
      stop_.Resume();
    }
    if (gate_ != nullptr) gate_->Open();
  }

  // May be called from any thread.
  void Abort(const absl::Status& reason) {
    stop_.Stop();
    if (gate_ != nullptr) gate_->Stop();
    const MutexLock lock(mu_);
    if (abort_reason_.ok()) abort_reason_ = reason;
    for (Seat& seat : seats_) {
      if (seat.endpoint != nullptr) seat.endpoint->Abort(abort_reason_);
    }
    if (weights_endpoint_ != nullptr) weights_endpoint_->Abort(abort_reason_);
  }

  // What an error has left queued uses the weights. No peer is waited for: the run is over for all of them.
  void Join() {
    ranks_.Join();
    for (Seat& seat : seats_) {
      if (seat.stream != nullptr) seat.stream->Finish().IgnoreError();
    }
  }

  // Frees what the run holds, there and then: who reads progress or aborts may have the run itself for
  // longer. After Join; from here on Abort finds no endpoint, and progress no rank.
  void End() {
    {
      const MutexLock lock(progress_mu_);
      ended_ = true;
    }
    std::vector<std::unique_ptr<Endpoint>> endpoints;
    std::unique_ptr<Endpoint> weights_endpoint;
    {
      const MutexLock lock(mu_);
      for (Seat& seat : seats_) endpoints.push_back(std::move(seat.endpoint));
      weights_endpoint = std::move(weights_endpoint_);
    }
    weights_.reset();
    weights_endpoint.reset();
    for (size_t i = 0; i < seats_.size(); ++i) {
      seats_[i].communicator.reset();
      endpoints[i].reset();
      seats_[i].stream.reset();
    }
    reservations_.clear();
    kv_.reset();
    prefix_.reset();
  }

  // From any thread. Nothing before the start and after the end.
  std::vector<WorkerMachine::RankProgress> progress() const {
    std::vector<WorkerMachine::RankProgress> all;
    const MutexLock lock(progress_mu_);
    if (ended_ || !started_.load(std::memory_order_acquire)) return all;
    for (size_t i = 0; i < seats_.size(); ++i) {
      const Seat& rank_seat = seats_[i];
      const uint64_t operations = rank_seat.stream->operations();
      if (rank_seat.connecting) rank_seat.connecting_reports += 2;
      all.push_back({.rank = seat(i),
                     .layers_done = rank_seat.layers_done.load(std::memory_order_relaxed),
                     .operations = operations + rank_seat.connecting_reports + weights_->reads(i),
                     .computing = operations % 2 == 1});
    }
    return all;
  }

 private:
  struct Seat {
    std::unique_ptr<CountingStream> stream;  // outlives the communicator
    std::unique_ptr<Endpoint> endpoint;
    std::unique_ptr<Communicator> communicator;
    std::atomic<int> layers_done{0};
    // Where connecting takes seconds, each report meanwhile counts as an operation: a deadline ends it.
    std::atomic<bool> connecting{false};
    mutable std::atomic<uint64_t> connecting_reports{0};
  };

  int seat(size_t i) const { return part_.first_rank + static_cast<int>(i); }  // seat in the run
  int rank(size_t i) const { return part_.plan.RankAt(seat(i)); }              // rank of the plan

  absl::StatusOr<std::unique_ptr<Endpoint>> ListenFor(size_t i) const {
    return host_.data_plane_->Listen({.local_rank = static_cast<int>(i),
                                      .rank = rank(i),
                                      .ranks = part_.plan.ranks(),
                                      .epoch = part_.epoch,
                                      .run = data_plane_run(),
                                      .stop = &stop_});
  }

  // Begins to read or gather. The ranks measure their links first, where they do.
  void OpenWeights(const std::vector<bool>& reads_head) {
    if (!SharesWeights()) {
      weights_.emplace(host_.pool_.models, host_.pool_.peers.get(), reads_head, &stop_);
      return;
    }
    const size_t ranks = std::min(addresses_.size(), static_cast<size_t>(part_.plan.ranks()));
    std::vector<std::string> addresses(addresses_.begin() + static_cast<ptrdiff_t>(ranks), addresses_.end());
    addresses_.resize(ranks);
    Endpoint* endpoint;
    {
      const MutexLock lock(mu_);
      endpoint = weights_endpoint_.get();
    }
    Gathering gathering{
        .share = part_.weights.share,
        .head = part_.tokens_ahead > 0 ? std::nullopt : std::optional(part_.weights.head),
        .at_once = probes_.empty(),
        .exchange = MakeWeightExchange(*endpoint, std::move(addresses), *seats_.front().stream,
                                       host_.data_plane_->connect_timeout(), PeerWaitTimeout(part_.plan))};
    weights_.emplace(*host_.sharded_, static_cast<int>(seats_.size()), std::move(gathering), &stop_);
  }

  // Says so where a rank failed because its device is lost.
  absl::StatusOr<RankOutput> BlameDevice(size_t i, absl::StatusOr<RankOutput> output) {
    if (output.ok()) return output;
    seats_[i].stream->Mark().IgnoreError();  // fails where the device has: lost() says so from then on
    if (!host_.pool_.devices[i]->lost()) return output;
    host_.lost_ = true;
    return absl::UnavailableError(absl::StrCat("a device (", host_.pool_.device_names[i],
                                               ") has failed under rank ", seat(i), ": ",
                                               output.status().message()));
  }

  absl::StatusOr<RankOutput> RunSeat(size_t i) {
    Seat& seat = seats_[i];
    seat.connecting = host_.data_plane_->connects_slowly();
    auto communicator = seat.endpoint->Connect(addresses_, *seat.stream,
                                               MonotonicNow() + host_.data_plane_->connect_timeout());
    seat.connecting = false;
    host_.LogRejectedPeers(rank(i), seat.endpoint->strangers());
    if (!communicator.ok()) return communicator.status();
    seat.communicator = *std::move(communicator);
    TimelineRecorder recorder(rank(i), TimelineRecorder::Clock::now(), /*capacity=*/0, &stop_);
    const absl::Duration paused_before = stop_.PausedTime();
    const RankPrompt prompt = {.plan = part_.plan,
                               .ids = part_.shards[i],
                               .kv = kv_.get(),
                               .prefix = prefix_.get(),
                               .tokens_ahead = part_.tokens_ahead};
    absl::StatusOr<RankOutput> output =
        RunRank({.prompts = {&prompt, 1},
                 .model = *host_.pool_.models[i],
                 .weights = weights_->feed(i),
                 .reader = weights_->reader(i),
                 .rank = rank(i),
                 .stream = *seat.stream,
                 .communicator = *seat.communicator,
                 .wait_timeout = PeerWaitTimeout(part_.plan),
                 .on_layer_done =
                     [&seat](int layer) { seat.layers_done.store(layer + 1, std::memory_order_relaxed); },
                 .recorder = &recorder,
                 .probes = probes_,
                 .gate = gate_.get(),
                 .gate_rank = static_cast<int>(i)});
    if (output.ok()) output->stats.total_seconds -= absl::ToDoubleSeconds(stop_.PausedTime() - paused_before);
    return output;
  }

  // From here to Resume no time counts.
  void OnStill(uint64_t pause) {
    {
      const MutexLock lock(pause_mu_);
      if (pause_ != pause) return;
      stop_.Pause();
    }
    host_.listener_.OnRunPaused(part_.number, pause, /*messages=*/0, /*still=*/true);
  }

  WorkerMachine::RunPart part_;
  RankHost& host_;
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
  mutable Mutex progress_mu_;  // not mu_: an abort may take long
  bool ended_ ABSL_GUARDED_BY(progress_mu_) = false;
  std::atomic<bool> started_{false};
  std::vector<Seat> seats_;                     // by rank of this worker; endpoints are set under mu_
  std::unique_ptr<Endpoint> weights_endpoint_;  // set under mu_; null: the weights are not shared
  std::optional<RankWeights> weights_;          // from the start on
  LocalRanks ranks_;                            // last: its threads use all of the above
};

RankHost::RankHost(EmbeddedPool pool, std::unique_ptr<ShardedWeights> sharded,
                   std::unique_ptr<DataPlane> data_plane, v1::ModelId model_id, int64_t kv_budget_bytes,
                   Listener& listener)
    : pool_(std::move(pool)),
      sharded_(std::move(sharded)),
      data_plane_(std::move(data_plane)),
      model_id_(std::move(model_id)),
      kv_(KvShapeOf(pool_.models.front()->shape()), kv_budget_bytes, MonotonicNow, KvMemoryOfDevices(pool_)),
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
                                                std::move(identified.id), kv_budget_bytes, listener));
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

std::shared_ptr<RankHost::ActiveRun> RankHost::Find(uint64_t run) const {
  const MutexLock lock(mu_);
  const auto entry = runs_.find(run);
  return entry != runs_.end() ? entry->second : nullptr;
}

std::vector<std::shared_ptr<RankHost::ActiveRun>> RankHost::Runs() const {
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
  auto run = std::make_shared<ActiveRun>(std::move(part), *this);
  {
    const MutexLock lock(mu_);
    runs_[run->number()] = run;
    if (stopping_.contains(run->number())) return absl::CancelledError("stopped before it was prepared");
  }
  RETURN_IF_ERROR(run->CheckWeights());
  if (!run->SharesWeights()) MakeRoom();
  RETURN_IF_ERROR(run->Reserve());
  RETURN_IF_ERROR(run->BeginKv());
  RETURN_IF_ERROR(run->OpenStreams());
  return run->Listen();
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
    EndRun(run, /*went_well=*/false);
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

void RankHost::Release(uint64_t run) {
  Post([this, run] {
    kv_.Keep(run);
    EndRun(run, /*went_well=*/true);  // all ranks are done, those of other workers too
  });
}

// Waits for the ranks, then frees what they held.
void RankHost::EndRun(uint64_t run, bool went_well) {
  std::shared_ptr<ActiveRun> current = Find(run);
  if (current == nullptr) return;
  current->Join();
  current->End();
  {
    const MutexLock lock(mu_);
    runs_.erase(run);
  }
  data_plane_->End(current->data_plane_run(), went_well);
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
