#include "server/pool/membership.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "engine/engine_options.h"
#include "engine/plan/rank_speed.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"
#include "server/pool/offered_speed.h"
#include "server/pool/run_plan.h"

namespace meshfill {
namespace {

constexpr size_t kMaxNameCharacters = 128;
constexpr size_t kMaxTextBytes = 256;  // most bytes of each other text of an offer
constexpr size_t kMaxRememberedRefusals = 256;
constexpr int kMostUnprepared = 3;                        // runs in a row that a worker could not prepare
constexpr uint64_t kMostEpochsAhead = uint64_t{1} << 42;  // milliseconds of 139 years: pool_engine.cc
constexpr size_t kMaxKeptOut = 256;
// What no machine has, so that plans over it would be of infinite or negative seconds and bytes.
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 60;
constexpr double kLeastRate = 1;  // FLOP/s, bytes/s
constexpr double kMostPeakFlops = 1e24;
constexpr double kMostSeconds = 1e6;
constexpr int64_t kMostWeightBytes = int64_t{1} << 50;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

bool HasBoundedTexts(const v1::Join& offer) {
  const auto bounded = [](const std::string& text) { return text.size() <= kMaxTextBytes; };
  return bounded(offer.host()) && bounded(offer.backend()) && bounded(offer.kv_address()) &&
         bounded(offer.data_plane()) && offer.devices_size() <= kMaxHostRanks &&
         std::all_of(offer.devices().begin(), offer.devices().end(), bounded);
}

absl::Status CheckOfferedSpeed(const PoolSpeed& speed) {
  RETURN_IF_ERROR(CheckPoolSpeed(speed));
  for (const auto& [name, value, kind] : kSpeedFields) {
    const bool rate = kind == SpeedField::Kind::kRate;
    if (rate ? speed.*value >= kLeastRate : speed.*value <= kMostSeconds) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("its ", name, " is ", speed.*value, ", as no machine's is"));
  }
  return absl::OkStatus();
}

absl::Status CheckOfferedWeights(const PlanWeights& weights) {
  RETURN_IF_ERROR(CheckPlanWeights(weights));
  const double longest = std::max({weights.layer_seconds, weights.layer_busy_seconds, weights.head_seconds});
  const int64_t most =
      std::max({weights.loaded_bytes, weights.run_bytes, weights.layer_bytes, weights.head_bytes});
  if (longest <= kMostSeconds && most <= kMostWeightBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("its weights take ", weights.loaded_bytes, " + ",
                                                 weights.run_bytes, " bytes and ", longest,
                                                 " s, as on no machine"));
}

// Where the worker streams its weights, and could share them.
absl::Status CheckOfferedSharing(const v1::Join& offer) {
  if (!offer.has_shared_weights()) return absl::OkStatus();
  if (!offer.weights().streamed() || !offer.shared_weights().sharded()) {
    return absl::InvalidArgumentError("what it could share is not sharded, or what it has is not streamed");
  }
  return CheckOfferedWeights(FromProto(offer.shared_weights()));
}

// For runs, beside the worker's share of the weights, where so many workers share them. Below 0: not even
// that has room.
int64_t RankMemoryBytes(const v1::Join& offer, const PlanWeights& weights, size_t workers) {
  const auto offered = static_cast<int64_t>(offer.memory_bytes());
  if (offered == 0) return kNoLimit;
  if (weights.mode != WeightMode::kSharded) return offered / offer.ranks();
  const int64_t left = (offered - ShareBytes(weights, static_cast<int>(workers))) / offer.ranks();
  return left > 0 ? left : -1;
}

// Without its faster parts.
PoolCapacity CapacityOfAll(std::span<const Membership::Worker* const> workers, const Topology& links) {
  PoolCapacity capacity;
  int64_t tightest = kNoLimit, tightest_sharing = kNoLimit, tightest_kv = kNoLimit;
  PlanWeights shared_weights;
  bool all_could_share = !workers.empty();
  for (const Membership::Worker* worker : workers) {
    const v1::Join& offer = worker->offer;
    const PoolSpeed offered = FromProto(offer.speed());
    capacity.speed = capacity.ranks == 0 ? offered : SlowerOf(capacity.speed, offered);
    capacity.ranks_share_cores = capacity.ranks_share_cores || offered.lone_rank_speedup > 1;
    tightest_kv = std::min(tightest_kv, static_cast<int64_t>(offer.kv_memory_bytes() / offer.ranks()));
    const PlanWeights weights = FromProto(offer.weights());
    const bool sharded = weights.mode == WeightMode::kSharded;
    capacity.rank_weights =
        MostOf(capacity.rank_weights, sharded ? weights : weights.Share(1, offer.ranks()));
    tightest = std::min(tightest, RankMemoryBytes(offer, weights, workers.size()));
    const PlanWeights to_share = FromProto(offer.shared_weights());
    shared_weights = MostOf(shared_weights, to_share);
    tightest_sharing = std::min(tightest_sharing, RankMemoryBytes(offer, to_share, workers.size()));
    all_could_share = all_could_share && offer.has_shared_weights() &&
                      offer.weight_layout() == workers.front()->offer.weight_layout();
    capacity.ranks += static_cast<int>(offer.ranks());
    capacity.kv_on_host = capacity.kv_on_host && offer.kv_on_host();
    capacity.many_messages = capacity.many_messages && offer.many_messages();
  }
  capacity.topology = links;
  int host = -1;
  for (size_t i = 0; i < workers.size(); ++i) {
    if (i == 0 || workers[i]->offer.host() != workers[i - 1]->offer.host()) ++host;
    capacity.first_seats.push_back(static_cast<int>(capacity.topology.node_of_seat.size()));
    capacity.topology.node_of_seat.insert(capacity.topology.node_of_seat.end(), workers[i]->offer.ranks(),
                                          host);
  }
  if (tightest != kNoLimit) capacity.rank_memory_bytes = tightest;
  if (tightest_kv != kNoLimit) capacity.rank_kv_bytes = tightest_kv;
  if (!all_could_share) return capacity;
  capacity.shared_weights = shared_weights;
  if (tightest_sharing != kNoLimit) capacity.shared_rank_memory_bytes = tightest_sharing;
  return capacity;
}

}  // namespace

Membership::Membership(Options options, LeaderActions& actions)
    : options_(std::move(options)),
      actions_(actions),
      weights_hash_(options_.model.weights_hash()),
      epoch_(options_.first_epoch) {}

bool Membership::OnStrangerMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now) {
  if (!strangers_.contains(connection)) return false;  // the connection was closed
  if (!message.has_join()) {
    Refuse(connection, "", "it did not begin with Join; run the same version on both", false);
    return false;
  }
  const v1::Join& offer = message.join();
  bool retry = false;
  if (const absl::Status status = CheckOffer(offer, message.epoch(), now, retry); !status.ok()) {
    Refuse(connection, offer.name().substr(0, kMaxNameCharacters), std::string(status.message()), retry);
    return false;
  }
  strangers_.erase(connection);
  std::erase_if(refused_, [&](const auto& refusal) { return refusal.first == offer.name(); });
  if (weights_hash_ == 0) weights_hash_ = offer.model().weights_hash();
  workers_[connection] = {.connection = connection, .offer = offer, .leaving = false, .heard_at = now};
  // It was in another pool, or in one whose leader's clock was ahead: it ends what is of earlier epochs.
  epoch_ = std::max(epoch_, message.epoch());
  changed_ = true;
  ++counters_.joins;
  actions_.AddMessage(connection, epoch_).mutable_welcome();
  actions_.Log(absl::StrCat("worker ", LogQuote(offer.name()), " joined from ", LogQuote(offer.host()),
                            " with ", RanksText(offer.ranks()), " of ", LogQuote(offer.backend()),
                            "; the pool has ", RanksText(ranks())));
  return true;
}

void Membership::Refuse(Connection connection, const std::string& name, const std::string& reason,
                        bool retry) {
  strangers_.erase(connection);
  v1::Refused& refused = *actions_.AddMessage(connection, epoch_).mutable_refused();
  refused.set_reason(reason);
  refused.set_retry(retry);
  actions_.Add(LeaderActions::Close{connection});
  ++counters_.refusals;
  if (refused_.contains({name, reason})) return;
  if (refused_.size() >= kMaxRememberedRefusals) refused_.clear();
  refused_.emplace(name, reason);
  actions_.Log(absl::StrCat(name.empty() ? "a stranger" : absl::StrCat("worker ", LogQuote(name)),
                            " refused: ", LogQuote(reason)),
               LogLevel::kWarning);
}

absl::Status Membership::CheckOffer(const v1::Join& offer, uint64_t heard_epoch, absl::Time now,
                                    bool& retry) const {
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
  if (!HasBoundedTexts(offer)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a worker's host, backend, devices and address have ", kMaxTextBytes,
                     " bytes each at most; set pool.worker.host to a shorter name"));
  }
  if (offer.memory_bytes() > kMaxMemoryBytes || offer.kv_memory_bytes() > kMaxMemoryBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the worker offers ", offer.memory_bytes(), " and ",
                                                   offer.kv_memory_bytes(),
                                                   " bytes of memory, as no machine has; set "
                                                   "pool.worker.memory_bytes and kv.memory_bytes"));
  }
  if (offer.memory_bytes() != 0 && offer.memory_bytes() < options_.least_memory_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the worker offers ", offer.memory_bytes(), " bytes of memory, in which no prompt runs; ",
        "free some of its memory, or raise pool.worker.memory_bytes"));
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
    // Where the leader has none itself, the first worker's may be the wrong ones.
    retry = options_.model.weights_hash() == 0;
    return absl::FailedPreconditionError(
        absl::StrCat("the worker's weights of model ", options_.model.name(), " differ from ",
                     retry ? "those of the workers that are there" : "the leader's",
                     "; give all the same files, and the same version of meshfill"));
  }
  if (offer.encrypt() != options_.encrypt) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the worker ", offer.encrypt() ? "encrypts" : "does not encrypt", " its data plane, this pool ",
        options_.encrypt ? "does; workers on CPUs can" : "does not", ": give both the same pool.encrypt"));
  }
  if (offer.ranks() < 1 || offer.ranks() > kMaxHostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a worker has 1 to ", kMaxHostRanks, " ranks, not ", offer.ranks()));
  }
  if (absl::Status good = CheckOfferedSpeed(FromProto(offer.speed())); !good.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("the worker does not say how fast it is (", good.message(),
                                                   "); run the same version on both"));
  }
  absl::Status weights = CheckOfferedWeights(FromProto(offer.weights()));
  if (weights.ok()) weights = CheckOfferedSharing(offer);
  if (!weights.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("the worker does not say what its weights take (",
                                                   weights.message(), "); run the same version on both"));
  }
  const bool sharded = offer.weights().sharded();
  for (const auto& [connection, worker] : workers_) {
    if (worker.offer.weights().sharded() == sharded) continue;
    retry = true;
    return absl::FailedPreconditionError(absl::StrCat("the worker's weights are ", sharded ? "" : "not ",
                                                      "sharded, those of the workers that are there are",
                                                      sharded ? " not" : "",
                                                      "; give all the same model.weights"));
  }
  for (const auto& [connection, worker] : workers_) {
    if (!sharded || worker.offer.weight_layout() == offer.weight_layout()) continue;
    retry = true;
    return absl::FailedPreconditionError(
        absl::StrCat("the worker packs weights for ", offer.backend(), ", those that are there for ",
                     worker.offer.backend(),
                     ", and the two cannot share them; set model.weights to streamed or resident, "
                     "or give the pool machines of one kind"));
  }
  for (const auto& [connection, worker] : workers_) {
    if (worker.offer.data_plane() == offer.data_plane()) continue;
    retry = true;
    return absl::FailedPreconditionError(absl::StrCat(
        "the worker computes on ", offer.backend(), ", those that are there on ", worker.offer.backend(),
        ", and ranks of the two cannot talk to each other; give all the same pool.worker.device"));
  }
  if (!(offer.peak_flops() >= 0 && offer.peak_flops() <= kMostPeakFlops)) {
    return absl::InvalidArgumentError(absl::StrCat("the worker offers ", offer.peak_flops(),
                                                   " FLOP/s, as no machine has; set pool.worker.peak_flops"));
  }
  if (heard_epoch > epoch_ && heard_epoch - epoch_ > kMostEpochsAhead) {
    return absl::FailedPreconditionError(absl::StrCat("the worker has heard of epoch ", heard_epoch,
                                                      ", this leader is in epoch ", epoch_,
                                                      ", and no pool has so many; start the worker again"));
  }
  retry = true;
  if (const auto kept_out = kept_out_.find(offer.name());
      kept_out != kept_out_.end() && now < kept_out->second.until && !workers_.empty()) {
    return absl::UnavailableError(absl::StrCat(
        "a worker of this name did not prepare a run as it should, and the pool does without it for ",
        absl::FormatDuration(kept_out->second.length), "; see that its machine is not overloaded"));
  }
  int ranks = static_cast<int>(offer.ranks());
  for (const auto& [connection, worker] : workers_) {
    ranks += static_cast<int>(worker.offer.ranks());
    if (worker.offer.name() == offer.name()) {
      return absl::AlreadyExistsError(absl::StrCat("a worker named ", offer.name(),
                                                   " is in the pool, from host ", worker.offer.host(),
                                                   "; give each its own pool.worker.name"));
    }
  }
  if (ranks > kMaxPlanRanks) {
    return absl::ResourceExhaustedError(absl::StrCat("the pool is full: it takes ", kMaxPlanRanks, " ranks"));
  }
  return absl::OkStatus();
}

void Membership::RefuseUnjoined(absl::Time now) {
  std::vector<Connection> mute;
  for (const auto& [connection, since] : strangers_) {
    if (now - since >= options_.join_timeout) mute.push_back(connection);
  }
  for (Connection connection : mute) {
    Refuse(connection, "", absl::StrCat("no Join came within ", absl::FormatDuration(options_.join_timeout)),
           true);
  }
}

void Membership::OnLeave(Worker& worker) {
  if (worker.leaving) return;
  worker.leaving = true;
  changed_ = true;
  actions_.Log(absl::StrCat("worker ", LogQuote(worker.offer.name()), " drains"));
}

void Membership::ReleaseDrained(const std::function<bool(Connection)>& is_busy) {
  for (auto entry = workers_.begin(); entry != workers_.end();) {
    const auto& [connection, worker] = *entry;
    if (!worker.leaving || is_busy(connection)) {
      ++entry;
      continue;
    }
    actions_.AddMessage(connection, epoch_).mutable_goodbye();
    actions_.Add(LeaderActions::Close{connection});
    actions_.Log(absl::StrCat("worker ", LogQuote(worker.offer.name()), " left"));
    entry = workers_.erase(entry);
  }
  ForgetWeightsWhereEmpty();
}

bool Membership::FailsToPrepare(Connection connection, bool prepared) {
  Worker& worker = workers_.at(connection);
  worker.unprepared = prepared ? 0 : worker.unprepared + 1;
  return worker.unprepared >= kMostUnprepared && workers_.size() > 1;
}

void Membership::OnLeaderStoodStill(absl::Duration stood, absl::Time now) {
  for (auto& [connection, worker] : workers_) worker.heard_at = std::min(now, worker.heard_at + stood);
  for (auto& [connection, since] : strangers_) since = std::min(now, since + stood);
}

void Membership::KeepOut(Connection connection, absl::Time now) {
  std::erase_if(kept_out_,
                [&](const auto& entry) { return now >= entry.second.until + options_.most_kept_out; });
  if (kept_out_.size() >= kMaxKeptOut) kept_out_.clear();
  auto& [until, length] = kept_out_[workers_.at(connection).offer.name()];
  length = std::clamp(2 * length, options_.least_kept_out, options_.most_kept_out);
  until = now + length;
}

std::string Membership::Remove(Connection connection, const std::string& why) {
  const auto entry = workers_.find(connection);
  const std::string name = entry->second.offer.name();
  workers_.erase(entry);
  actions_.Add(LeaderActions::Close{connection});
  changed_ = true;
  ++counters_.losses;
  actions_.Log(absl::StrCat("worker ", LogQuote(name), " is lost: ", LogQuote(why), "; the pool has ",
                            RanksText(ranks())),
               LogLevel::kWarning);
  ForgetWeightsWhereEmpty();
  return name;
}

// The next worker may bring others.
void Membership::ForgetWeightsWhereEmpty() {
  if (workers_.empty()) weights_hash_ = options_.model.weights_hash();
}

bool Membership::BeginRun() {
  if (!changed_) return false;
  ++epoch_;
  ++counters_.epochs;
  changed_ = false;
  return true;
}

Membership::Worker* Membership::Find(Connection connection) {
  const auto entry = workers_.find(connection);
  return entry != workers_.end() ? &entry->second : nullptr;
}

std::set<Membership::Connection> Membership::Silent(absl::Time now) const {
  std::set<Connection> silent;
  for (const auto& [connection, worker] : workers_) {
    if (now - worker.heard_at >= options_.silence_timeout) silent.insert(connection);
  }
  return silent;
}

std::vector<const Membership::Worker*> Membership::ByPlace() const {
  std::vector<std::pair<double, const Worker*>> staying;  // with its seconds for a FLOP
  double least_seconds = std::numeric_limits<double>::infinity();
  for (const auto& [connection, worker] : workers_) {
    if (worker.leaving) continue;
    const double seconds = SecondsPerFlop(FromProto(worker.offer.speed()));
    staying.emplace_back(seconds, &worker);
    least_seconds = std::min(least_seconds, seconds);
  }
  std::map<absl::string_view, int> of_host;  // of its slowest
  // Steps of kSlower down from the fastest: its host's, its own.
  using Place = std::tuple<int, absl::string_view, int, absl::string_view>;
  std::vector<std::pair<Place, const Worker*>> places;
  for (const auto& [seconds, worker] : staying) {
    const int down = static_cast<int>(std::log(seconds / least_seconds) / std::log(kSlower));
    int& host_down = of_host[worker->offer.host()];
    host_down = std::max(host_down, down);
    places.push_back({{0, worker->offer.host(), down, worker->offer.name()}, worker});
  }
  for (auto& [place, worker] : places) std::get<0>(place) = of_host.at(worker->offer.host());
  std::sort(places.begin(), places.end());
  std::vector<const Worker*> by_place;
  for (const auto& [place, worker] : places) by_place.push_back(worker);
  return by_place;
}

int Membership::workers_to_stay() const {
  return static_cast<int>(std::count_if(workers_.begin(), workers_.end(),
                                        [](const auto& entry) { return !entry.second.leaving; }));
}

int Membership::ranks() const {
  int ranks = 0;
  for (const auto& [connection, worker] : workers_) {
    if (!worker.leaving) ranks += static_cast<int>(worker.offer.ranks());
  }
  return ranks;
}

double Membership::peak_flops() const {
  double flops = 0;
  for (const auto& [connection, worker] : workers_) {
    if (!worker.leaving) flops += worker.offer.peak_flops();
  }
  return flops;
}

PoolCapacity CapacityOf(const std::vector<const Membership::Worker*>& workers, const Topology& links) {
  PoolCapacity all = CapacityOfAll(workers, links);
  PoolSpeed speed;           // of those before
  double alike_seconds = 0;  // per FLOP, of the first of those that count as alike
  for (size_t before = 0; before < workers.size(); ++before) {
    const PoolSpeed offered = FromProto(workers[before]->offer.speed());
    speed = before == 0 ? offered : SlowerOf(speed, offered);
    if (before > 0 && SecondsPerFlop(speed) <= kSlower * alike_seconds) continue;
    alike_seconds = SecondsPerFlop(speed);
    if (before == 0) continue;
    all.faster_parts.push_back(CapacityOfAll(std::span(workers).first(before), links));
    all.faster_parts.back().shared_weights.reset();
  }
  return all;
}

PoolCapacity OneRankOf(PoolCapacity capacity) {
  capacity.ranks = 1;
  capacity.first_seats = {0};
  capacity.topology.node_of_seat = {0};
  capacity.speed.lone_rank_speedup = 1;
  capacity.faster_parts.clear();
  capacity.shared_weights.reset();
  return capacity;
}

std::vector<std::vector<const Membership::Worker*>> DivideWorkers(
    const std::vector<const Membership::Worker*>& workers, int submeshes) {
  std::vector<std::vector<const Membership::Worker*>> meshes;
  const size_t count = std::min(workers.size(), static_cast<size_t>(submeshes));
  for (size_t i = 0; i < count; ++i) {
    const auto begin = workers.begin() + static_cast<std::ptrdiff_t>(i * workers.size() / count);
    const auto end = workers.begin() + static_cast<std::ptrdiff_t>((i + 1) * workers.size() / count);
    meshes.emplace_back(begin, end);
  }
  return meshes;
}

std::vector<SeatsOfWorker> SeatWorkers(const std::vector<const Membership::Worker*>& workers, int ranks) {
  std::vector<SeatsOfWorker> seats;
  int first = 0;
  for (const Membership::Worker* worker : workers) {
    const int count = std::min(static_cast<int>(worker->offer.ranks()), ranks - first);
    if (count == 0) break;  // this worker and those after it are idle
    seats.push_back({worker, first, count});
    first += count;
  }
  return seats;
}

std::vector<int> PoolRanks(const std::vector<const Membership::Worker*>& all,
                           const std::vector<const Membership::Worker*>& workers, int ranks) {
  std::map<const Membership::Worker*, int> first_rank;
  int next = 0;
  for (const Membership::Worker* worker : all) {
    first_rank[worker] = next;
    next += static_cast<int>(worker->offer.ranks());
  }
  std::vector<int> by_seat;
  for (const auto& [worker, first, count] : SeatWorkers(workers, ranks)) {
    const auto [of, drains] = first_rank.try_emplace(worker, next);
    if (drains) next += static_cast<int>(worker->offer.ranks());
    for (int i = 0; i < count; ++i) by_seat.push_back(of->second + i);
  }
  return by_seat;
}

}  // namespace meshfill
