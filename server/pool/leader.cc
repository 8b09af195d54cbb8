// Membership: who joins, who is refused, who is lost. Runs are in leader_run.cc.
#include "server/pool/leader.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/log.h"
#include "server/pool/offered_speed.h"

namespace meshfill {
namespace {

constexpr int kMaxPoolRanks = 1024;
constexpr uint32_t kMaxWorkerRanks = 64;
constexpr size_t kMaxNameCharacters = 128;
constexpr size_t kMaxRememberedRefusals = 256;

}  // namespace

const char* WorkerStateName(Leader::WorkerState state) {
  switch (state) {
    case Leader::WorkerState::kReady:
      return "ready";
    case Leader::WorkerState::kPreparing:
      return "preparing";
    case Leader::WorkerState::kRunning:
      return "running";
    case Leader::WorkerState::kStopping:
      return "stopping";
    case Leader::WorkerState::kDraining:
      return "draining";
  }
  return "?";
}

Leader::Leader(Options options, PoolPlanner planner)
    : options_(std::move(options)),
      planner_(std::move(planner)),
      weights_hash_(options_.model.weights_hash()),
      survey_(options_.links),
      epoch_(options_.first_epoch) {}

void Leader::OnConnected(Connection connection, absl::Time now) { strangers_[connection] = now; }

void Leader::OnMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now) {
  const auto entry = workers_.find(connection);
  if (entry == workers_.end()) {
    if (!strangers_.contains(connection)) return;  // of a connection that was closed
    if (message.has_join()) return OnJoin(connection, message.join(), message.epoch(), now);
    return Refuse(connection, "", "it did not begin with Join; run the same version on both", false);
  }
  Worker& worker = entry->second;
  worker.heard_at = now;
  if (message.epoch() > epoch_) {
    return Lose({connection}, absl::StrCat("it speaks of epoch ", message.epoch(), " in epoch ", epoch_),
                now);
  }
  switch (message.body_case()) {
    case v1::WorkerMessage::kPrepared:
      if (IsOfRun(message, message.prepared().run())) OnPrepared(worker, message.prepared(), now);
      break;
    case v1::WorkerMessage::kProgress:
      if (IsOfRun(message, message.progress().run())) OnProgress(worker, message.progress(), now);
      break;
    case v1::WorkerMessage::kRankDone:
      if (IsOfRun(message, message.rank_done().run())) OnRankDone(worker, message.rank_done(), now);
      break;
    case v1::WorkerMessage::kStopped:
      if (IsOfRun(message, message.stopped().run())) OnStopped(connection, now);
      break;
    case v1::WorkerMessage::kLeave:
      OnLeave(worker);
      break;
    case v1::WorkerMessage::kJoin:
    case v1::WorkerMessage::BODY_NOT_SET:
      break;
  }
}

void Leader::OnDisconnected(Connection connection, absl::Time now) {
  strangers_.erase(connection);
  if (workers_.contains(connection)) Lose({connection}, "its stream ended", now);
}

void Leader::Refuse(Connection connection, const std::string& name, const std::string& reason, bool retry) {
  strangers_.erase(connection);
  v1::Refused& refused = *AddMessage(connection, epoch_).mutable_refused();
  refused.set_reason(reason);
  refused.set_retry(retry);
  actions_.push_back(Close{connection});
  ++counters_.refusals;
  if (refused_.size() >= kMaxRememberedRefusals) refused_.clear();
  if (!refused_.emplace(name, reason).second) return;
  Log(absl::StrCat(name.empty() ? "a stranger" : absl::StrCat("worker ", LogQuote(name)),
                   " refused: ", LogQuote(reason)));
}

void Leader::OnJoin(Connection connection, const v1::Join& offer, uint64_t heard_epoch, absl::Time now) {
  bool retry = false;
  if (const absl::Status status = CheckOffer(offer, heard_epoch, retry); !status.ok()) {
    return Refuse(connection, offer.name().substr(0, kMaxNameCharacters), std::string(status.message()),
                  retry);
  }
  strangers_.erase(connection);
  std::erase_if(refused_, [&](const auto& refusal) { return refusal.first == offer.name(); });
  if (weights_hash_ == 0) weights_hash_ = offer.model().weights_hash();
  workers_[connection] = {.connection = connection, .offer = offer, .leaving = false, .heard_at = now};
  membership_changed_ = true;
  ++counters_.joins;
  AddMessage(connection, epoch_).mutable_welcome();
  Log(absl::StrCat("worker ", LogQuote(offer.name()), " joined from ", LogQuote(offer.host()), " with ",
                   offer.ranks(), " ranks of ", LogQuote(offer.backend()), "; the pool has ",
                   capacity().ranks, " ranks"));
  StartNext(now);
}

absl::Status Leader::CheckOffer(const v1::Join& offer, uint64_t heard_epoch, bool& retry) const {
  const v1::ModelId& model = offer.model();
  if (offer.protocol() != kControlProtocol) {
    return absl::FailedPreconditionError(absl::StrCat("the worker speaks control protocol ", offer.protocol(),
                                                      ", this leader ", kControlProtocol,
                                                      "; run the same version on both"));
  }
  if (offer.build() != options_.build) {
    return absl::FailedPreconditionError(absl::StrCat("the worker's build is ", offer.build().substr(0, 128),
                                                      ", this leader's ", options_.build,
                                                      "; run the same version on both"));
  }
  if (offer.name().empty() || offer.name().size() > kMaxNameCharacters) {
    return absl::InvalidArgumentError(
        absl::StrCat("a worker's name has 1 to ", kMaxNameCharacters, " characters; set pool.worker.name"));
  }
  if (model.config_hash() != options_.model.config_hash()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the worker has model ", model.name().substr(0, 128), " with another config.json than ",
                     options_.model.name(), " here; give both the same model.path"));
  }
  if (model.dtype() != options_.model.dtype()) {
    return absl::FailedPreconditionError(absl::StrCat("the worker computes in ", model.dtype().substr(0, 16),
                                                      ", this pool in ", options_.model.dtype(),
                                                      "; give both the same model.dtype"));
  }
  if (weights_hash_ != 0 && model.weights_hash() != weights_hash_) {
    return absl::FailedPreconditionError(absl::StrCat("the worker's weights of model ", options_.model.name(),
                                                      " differ from the pool's; give all the same files"));
  }
  if (offer.ranks() < 1 || offer.ranks() > kMaxWorkerRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a worker has 1 to ", kMaxWorkerRanks, " ranks, not ", offer.ranks()));
  }
  if (!IsPlausible(FromProto(offer.speed()))) {
    return absl::InvalidArgumentError("the worker does not say how fast it is; run the same version on both");
  }
  if (heard_epoch > epoch_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the worker has heard of epoch ", heard_epoch, ", this leader is in epoch ", epoch_,
        ": it was in another pool, or this machine's clock was set back; start the worker again"));
  }
  retry = true;
  int ranks = static_cast<int>(offer.ranks());
  for (const auto& [connection, worker] : workers_) {
    ranks += static_cast<int>(worker.offer.ranks());
    if (worker.offer.name() == offer.name()) {
      return absl::AlreadyExistsError(absl::StrCat("a worker named ", offer.name(),
                                                   " is in the pool, from host ", worker.offer.host(),
                                                   "; give each its own pool.worker.name"));
    }
  }
  if (ranks > kMaxPoolRanks) {
    return absl::ResourceExhaustedError(absl::StrCat("the pool is full: it takes ", kMaxPoolRanks, " ranks"));
  }
  return absl::OkStatus();
}

void Leader::OnLeave(Worker& worker) {
  if (worker.leaving) return;
  worker.leaving = true;
  membership_changed_ = true;
  Log(absl::StrCat("worker ", LogQuote(worker.offer.name()), " drains"));
  LetGoOfLeaving();
}

void Leader::LetGoOfLeaving() {
  for (auto entry = workers_.begin(); entry != workers_.end();) {
    const auto& [connection, worker] = *entry;
    if (!worker.leaving || InRun(connection)) {
      ++entry;
      continue;
    }
    AddMessage(connection, epoch_).mutable_goodbye();
    actions_.push_back(Close{connection});
    Log(absl::StrCat("worker ", LogQuote(worker.offer.name()), " left"));
    entry = workers_.erase(entry);
  }
  if (workers_.empty()) weights_hash_ = options_.model.weights_hash();
}

void Leader::Lose(const std::set<Connection>& connections, const std::string& why, absl::Time now) {
  std::string in_run;  // names
  for (Connection connection : connections) {
    const auto entry = workers_.find(connection);
    const std::string name = entry->second.offer.name();
    workers_.erase(entry);
    actions_.push_back(Close{connection});
    membership_changed_ = true;
    ++counters_.losses;
    Log(absl::StrCat("worker ", LogQuote(name), " is lost: ", LogQuote(why), "; the pool has ",
                     capacity().ranks, " ranks"));
    if (!InRun(connection)) continue;
    run_->unanswered.erase(connection);
    absl::StrAppend(&in_run, in_run.empty() ? "" : ", ", name);
  }
  if (workers_.empty()) weights_hash_ = options_.model.weights_hash();
  if (in_run.empty()) return;
  if (run_->phase == Phase::kStopping) return StoppingMayBeOver(now);
  EndEpoch(absl::StrCat("worker ", in_run, " is lost: ", why), now);
}

void Leader::OnTick(absl::Time now) {
  std::vector<Connection> mute;
  for (const auto& [connection, since] : strangers_) {
    if (now - since >= options_.join_timeout) mute.push_back(connection);
  }
  for (Connection connection : mute) {
    Refuse(connection, "", absl::StrCat("no Join came within ", absl::FormatDuration(options_.join_timeout)),
           true);
  }
  std::set<Connection> silent;
  for (const auto& [connection, worker] : workers_) {
    if (now - worker.heard_at >= options_.silence_timeout) silent.insert(connection);
  }
  if (!silent.empty()) {
    Lose(silent, absl::StrCat("silent for ", absl::FormatDuration(options_.silence_timeout)), now);
  }
  CheckProgress(now);
  if (now - last_heartbeat_ < options_.heartbeat_interval) return;
  last_heartbeat_ = now;
  for (const auto& [connection, worker] : workers_) AddMessage(connection, epoch_).mutable_heartbeat();
}

std::vector<const Leader::Worker*> Leader::ByPlace() const {
  std::vector<const Worker*> staying;
  for (const auto& [connection, worker] : workers_) {
    if (!worker.leaving) staying.push_back(&worker);
  }
  std::sort(staying.begin(), staying.end(), [](const Worker* left, const Worker* right) {
    return std::tie(left->offer.host(), left->offer.name()) <
           std::tie(right->offer.host(), right->offer.name());
  });
  return staying;
}

PoolCapacity Leader::capacity() const {
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  PoolCapacity capacity;
  int64_t tightest = kNoLimit;
  for (const auto& [connection, worker] : workers_) {
    if (worker.leaving) continue;
    const PoolSpeed offered = FromProto(worker.offer.speed());
    capacity.speed = capacity.ranks == 0 ? offered : SlowerOf(capacity.speed, offered);
    if (worker.offer.memory_bytes() != 0) {
      tightest = std::min(tightest, static_cast<int64_t>(worker.offer.memory_bytes() / worker.offer.ranks()));
    }
    capacity.ranks += static_cast<int>(worker.offer.ranks());
  }
  capacity.topology = survey_.links();
  const std::vector<const Worker*> by_place = ByPlace();
  int host = -1;
  for (size_t i = 0; i < by_place.size(); ++i) {
    if (i == 0 || by_place[i]->offer.host() != by_place[i - 1]->offer.host()) ++host;
    capacity.topology.node_of_seat.insert(capacity.topology.node_of_seat.end(), by_place[i]->offer.ranks(),
                                          host);
  }
  if (tightest != kNoLimit) capacity.rank_memory_bytes = tightest;
  return capacity;
}

double Leader::peak_flops() const {
  double flops = 0;
  for (const auto& [connection, worker] : workers_) {
    if (!worker.leaving) flops += worker.offer.peak_flops();
  }
  return flops;
}

std::vector<Leader::WorkerView> Leader::workers() const {
  std::vector<const Worker*> all = ByPlace();
  for (const auto& [connection, worker] : workers_) {
    if (worker.leaving) all.push_back(&worker);
  }
  std::vector<WorkerView> views;
  for (const Worker* worker : all) {
    WorkerView view{
        .offer = &worker->offer, .state = WorkerState::kReady, .first_rank = -1, .ranks_in_use = 0};
    if (InRun(worker->connection)) {
      view.state = run_->phase == Phase::kPreparing ? WorkerState::kPreparing
                   : run_->phase == Phase::kRunning ? WorkerState::kRunning
                                                    : WorkerState::kStopping;
      view.first_rank = run_->first_rank.at(worker->connection);
      for (const Seat& seat : run_->seats) view.ranks_in_use += seat.worker == worker->connection ? 1 : 0;
    }
    if (worker->leaving) view.state = WorkerState::kDraining;
    views.push_back(view);
  }
  return views;
}

std::vector<Leader::Action> Leader::TakeActions() { return std::exchange(actions_, {}); }

v1::LeaderMessage& Leader::AddMessage(Connection to, uint64_t epoch) {
  Send& send = std::get<Send>(actions_.emplace_back(Send{.to = to, .message = {}}));
  send.message.set_epoch(epoch);
  return send.message;
}

}  // namespace meshfill
