#include "server/pool/worker/active_run.h"

#include <algorithm>
#include <span>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/devices/free_memory.h"
#include "engine/model/model_tensors.h"
#include "engine/run/weight_exchange.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr absl::Duration kReadersLetGo = absl::Milliseconds(500);

}  // namespace

ActiveRun::ActiveRun(WorkerMachine::RunPart part, const Worker& worker, Events events,
                     std::shared_ptr<RankPack> pack)
    : part_(std::move(part)),
      worker_(worker),
      events_(std::move(events)),
      pack_(std::move(pack)),
      seats_(part_.shards.size()) {
  if (worker_.data_plane.messages_mix() || part_.plan.ranks() == 1) return;
  gate_ = std::make_unique<MessageGate>(static_cast<int>(seats_.size()),
                                        [this](uint64_t pause) { OnStill(pause); });
}

absl::Status ActiveRun::CheckWeights() const {
  const WeightMode mode = worker_.pool.models.front()->weight_mode();
  const bool alone = mode != WeightMode::kSharded || worker_.pool.peers != nullptr;
  const bool can = SharesWeights() ? worker_.sharded != nullptr : alone;
  if (can) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the run's workers ", SharesWeights() ? "share" : "do not share",
                                          " their weights, and this one's are ", WeightModeName(mode)));
}

absl::Status ActiveRun::Reserve() {
  const int64_t bytes = part_.reserve_bytes;
  const int64_t free = worker_.pool.hardware->in_host_memory() ? FreeMemoryBytes() : 0;  // 0: not known
  // What lies spare is taken before anything new.
  if (free > 0 && bytes > free + static_cast<int64_t>(SpareMappings::spare_bytes())) {
    return absl::FailedPreconditionError(absl::StrCat("the run needs ", bytes, " bytes of memory, and ", free,
                                                      " are free; shorten the prompt or add ranks"));
  }
  for (size_t i = 0; i < seats_.size(); ++i) {
    ASSIGN_OR_RETURN(BufferRef reservation,
                     worker_.pool.devices[local(i)]->Allocate(static_cast<size_t>(bytes) / seats_.size()));
    reservations_.push_back(std::move(reservation));
  }
  return absl::OkStatus();
}

absl::Status ActiveRun::BeginKv() {
  ASSIGN_OR_RETURN(prefix_, worker_.kv.PrefixOf(part_.prefix));
  if (!part_.keep_kv.has_value()) return absl::OkStatus();
  std::vector<int> ranks;
  for (size_t i = 0; i < seats_.size(); ++i) ranks.push_back(rank(i));
  // The leader counts on the room of what it has given up; a reader holds that for a part more.
  const absl::Time deadline = MonotonicNow() + kReadersLetGo;
  while (true) {
    auto kv = worker_.kv.Begin(part_.number, *part_.keep_kv, prefix_, part_.plan.layout, ranks);
    if (absl::IsResourceExhausted(kv.status()) && MonotonicNow() < deadline) {
      absl::SleepFor(absl::Milliseconds(1));
      continue;
    }
    ASSIGN_OR_RETURN(kv_, std::move(kv));
    return absl::OkStatus();
  }
}

absl::Status ActiveRun::OpenStreams() {
  if (pack_ != nullptr) return absl::OkStatus();
  for (size_t i = 0; i < seats_.size(); ++i) {
    ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, worker_.pool.devices[local(i)]->NewStream(&stop_));
    seats_[i].stream = std::make_unique<CountingStream>(std::move(stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ActiveRun::Listen() {
  std::vector<std::string> addresses;
  if (pack_ != nullptr) return addresses;  // its rank has no peers
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
      worker_.data_plane.Listen({.local_rank = 0,
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

void ActiveRun::Start(std::vector<std::string> addresses, std::vector<LinkProbe> probes) {
  addresses_ = std::move(addresses);
  probes_ = std::move(probes);
  reservations_.clear();
  std::vector<bool> reads_head;
  for (size_t i = 0; i < seats_.size(); ++i) {
    reads_head.push_back(ReadsHead(part_.plan, rank(i), part_.tokens_ahead == 0));
  }
  if (pack_ == nullptr) OpenWeights(reads_head);
  started_.store(true, std::memory_order_release);
  ranks_.Start(
      static_cast<int>(seats_.size()), [this](int i) { return pack_ != nullptr ? RunInPack() : RunSeat(i); },
      [this](int i, absl::StatusOr<RankOutput> output) {
        if (!output.ok()) LookForLoss(i, output.status());
        events_.on_rank_done(seat(i), std::move(output));
      });
}

int64_t ActiveRun::Pause(uint64_t number) {
  const MutexLock lock(pause_mu_);
  pause_ = number;
  if (number > 0 && gate_ != nullptr) return gate_->Close(number);
  pack_ != nullptr ? pack_->Pause(part_.number) : stop_.Pause();
  return 0;
}
void ActiveRun::PauseAt(uint64_t number, int64_t messages) {
  gate_ != nullptr ? gate_->CloseAt(number, messages) : OnStill(number);
}
void ActiveRun::Resume() {
  {
    const MutexLock lock(pause_mu_);
    pause_ = 0;
    pack_ != nullptr ? pack_->Resume(part_.number) : stop_.Resume();
  }
  if (gate_ != nullptr) gate_->Open();
}

void ActiveRun::Abort(const absl::Status& reason) {
  stop_.Stop();
  if (pack_ != nullptr) pack_->Abort(reason);
  if (gate_ != nullptr) gate_->Stop();
  const MutexLock lock(mu_);
  if (!abort_reason_.ok()) return;
  abort_reason_ = reason;
  std::vector<Endpoint*> endpoints;
  for (Seat& seat : seats_) endpoints.push_back(seat.endpoint.get());
  endpoints.push_back(weights_endpoint_.get());
  std::erase(endpoints, nullptr);
  if (endpoints.empty()) return;
  const auto abort = [reason, endpoints] {
    for (Endpoint* endpoint : endpoints) endpoint->Abort(reason);
  };
  try {
    aborter_ = std::thread(abort);
  } catch (const std::system_error&) {  // no thread is to be had
    abort();
  }
}

void ActiveRun::Join() {
  ranks_.Join();
  for (Seat& seat : seats_) {
    if (seat.stream != nullptr) seat.stream->Finish().IgnoreError();
  }
}

void ActiveRun::JoinAborter() {
  std::thread aborter;
  {
    const MutexLock lock(mu_);
    aborter = std::move(aborter_);
  }
  if (aborter.joinable()) aborter.join();
}

void ActiveRun::End() {
  {
    const MutexLock lock(progress_mu_);
    ended_ = true;
  }
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::unique_ptr<Endpoint> weights_endpoint;
  JoinAborter();  // it uses them
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

std::vector<WorkerMachine::RankProgress> ActiveRun::progress() const {
  std::vector<WorkerMachine::RankProgress> all;
  const MutexLock lock(progress_mu_);
  if (ended_ || !started_.load(std::memory_order_acquire)) return all;
  for (size_t i = 0; i < seats_.size(); ++i) {
    const Seat& rank_seat = seats_[i];
    const uint64_t operations = pack_ != nullptr ? pack_->operations() : rank_seat.stream->operations();
    if (rank_seat.connecting) rank_seat.connecting_reports += 2;
    all.push_back({.rank = seat(i),
                   .layers_done = rank_seat.layers_done.load(std::memory_order_relaxed),
                   .operations = operations + rank_seat.connecting_reports +
                                 (weights_.has_value() ? weights_->reads(i) : 0),
                   .computing = operations % 2 == 1,
                   .has_computed = operations > 0});
  }
  return all;
}

absl::StatusOr<std::unique_ptr<Endpoint>> ActiveRun::ListenFor(size_t i) const {
  return worker_.data_plane.Listen({.local_rank = static_cast<int>(local(i)),
                                    .rank = rank(i),
                                    .ranks = part_.plan.ranks(),
                                    .epoch = part_.epoch,
                                    .run = data_plane_run(),
                                    .stop = &stop_});
}

void ActiveRun::OpenWeights(const std::vector<bool>& reads_head) {
  if (!SharesWeights()) {
    weights_.emplace(std::span(worker_.pool.models).subspan(local(0)), worker_.pool.peers.get(), reads_head,
                     &stop_);
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
  Gathering gathering{.share = part_.weights.share,
                      .head = part_.tokens_ahead > 0 ? std::nullopt : std::optional(part_.weights.head),
                      .at_once = probes_.empty(),
                      .exchange = MakeWeightExchange(*endpoint, std::move(addresses), *seats_.front().stream,
                                                     {.connect = worker_.data_plane.connect_timeout(),
                                                      .piece = PeerWaitTimeout(part_.plan)})};
  weights_.emplace(*worker_.sharded, static_cast<int>(seats_.size()), std::move(gathering), &stop_);
}

void ActiveRun::LookForLoss(size_t i, const absl::Status& failure) {
  // Fails where the device has: lost() says so from then on.
  if (pack_ == nullptr) seats_[i].stream->Mark().IgnoreError();
  if (!worker_.pool.devices[local(i)]->lost() || worker_.lost.exchange(true)) return;
  Log(absl::StrCat("device ", local(i), " (", worker_.pool.device_names[local(i)], ") has failed under rank ",
                   seat(i), " of run ", part_.number, ": ", LogQuote(failure.message())),
      {.level = LogLevel::kError});
}

absl::StatusOr<RankOutput> ActiveRun::RunSeat(size_t i) {
  Seat& seat = seats_[i];
  seat.connecting = worker_.data_plane.connects_slowly();
  auto communicator =
      seat.endpoint->Connect(addresses_, *seat.stream, MonotonicNow() + worker_.data_plane.connect_timeout());
  seat.connecting = false;
  events_.on_strangers(rank(i), seat.endpoint->strangers());
  if (!communicator.ok()) return communicator.status();
  seat.communicator = *std::move(communicator);
  TimelineRecorder recorder(rank(i), TimelineRecorder::Clock::now(), /*capacity=*/0, &stop_);
  const absl::Duration paused_before = stop_.PausedTime();
  const RankPrompt prompt = {.plan = part_.plan,
                             .ids = part_.shards[i],
                             .kv = kv_.get(),
                             .prefix = prefix_.get(),
                             .tokens_ahead = part_.tokens_ahead};
  absl::StatusOr<RankOutput> output = RunRank(
      {.prompts = {&prompt, 1},
       .model = *worker_.pool.models[local(i)],
       .weights = weights_->feed(i),
       .reader = weights_->reader(i),
       .rank = rank(i),
       .stream = *seat.stream,
       .communicator = *seat.communicator,
       .wait_timeout = PeerWaitTimeout(part_.plan),
       .on_layer_done = [&seat](int layer) { seat.layers_done.store(layer + 1, std::memory_order_relaxed); },
       .recorder = &recorder,
       .probes = probes_,
       .gate = gate_.get(),
       .gate_rank = static_cast<int>(i)});
  if (output.ok()) output->stats.total_seconds -= absl::ToDoubleSeconds(stop_.PausedTime() - paused_before);
  return output;
}

absl::StatusOr<RankOutput> ActiveRun::RunInPack() {
  Seat& seat = seats_.front();
  return pack_->Compute(
      {.plan = part_.plan, .ids = part_.shards.front(), .kv = kv_.get(), .prefix = prefix_.get()},
      [&seat](int layer) { seat.layers_done.store(layer + 1, std::memory_order_relaxed); });
}

void ActiveRun::OnStill(uint64_t pause) {
  {
    const MutexLock lock(pause_mu_);
    if (pause_ != pause) return;
    stop_.Pause();
  }
  events_.on_still(pause);
}

}  // namespace meshfill
