#include "server/pool/run_coordinator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/comm/gloo/gloo_data_plane.h"
#include "engine/comm/gloo/gloo_rendezvous.h"
#include "kernels/return_if_error.h"
#include "server/pool/run_plan.h"

namespace meshfill {
namespace {

constexpr int kShardIds = 512 << 10;  // token ids of a message: below 4 MiB at 3 to 5 bytes each
constexpr double kSlowBlock = 10;     // times the predicted seconds of a block: hung
constexpr double kPrepareSecondsPerToken = 1e-6;

// What a rank fails with when others did: the network, a peer, an abort. Anything else is the request's own.
bool IsRetryable(absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kAborted ||
         code == absl::StatusCode::kCancelled || code == absl::StatusCode::kDeadlineExceeded ||
         code == absl::StatusCode::kDataLoss || code == absl::StatusCode::kUnknown;
}

// Whether a status says that the client has done something wrong. The front-end has checked the request, so
// that a worker which says so is wrong itself.
bool BlamesTheClient(absl::StatusCode code) {
  return code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kNotFound ||
         code == absl::StatusCode::kAlreadyExists || code == absl::StatusCode::kPermissionDenied ||
         code == absl::StatusCode::kUnauthenticated || code == absl::StatusCode::kOutOfRange;
}

// What a client hears of a worker's failure.
absl::Status WithWorkerName(const std::string& worker, const absl::Status& status) {
  std::string message = absl::StrCat("worker ", worker, ": ", status.message());
  std::replace_if(
      message.begin(), message.end(), [](unsigned char byte) { return absl::ascii_iscntrl(byte); }, ' ');
  return absl::Status(BlamesTheClient(status.code()) ? absl::StatusCode::kInternal : status.code(), message);
}

absl::Duration HangTimeout(const Plan& plan, const RunCoordinator::Options& options) {
  const double blocks = std::max(1, plan.tile.ranks()) * static_cast<double>(options.layers);
  const double block_seconds = std::min(plan.predicted.compute_seconds / blocks, 1e6);
  return std::max(options.hang_timeout, absl::Seconds(kSlowBlock * block_seconds));
}

}  // namespace

int64_t ReservedBytes(const Plan& plan, int ranks) {
  return (plan.predicted.run_bytes + plan.ranks() - 1) / plan.ranks() * ranks;
}

RunCoordinator::RunCoordinator(uint64_t number, uint64_t epoch, Plan plan, std::span<const uint32_t> tokens,
                               const std::vector<const Membership::Worker*>& workers,
                               const KvDirectory::RunKv& kv, const Options& options, LeaderActions& actions,
                               LinkSurvey& survey, absl::Time now)
    : number_(number),
      epoch_(epoch),
      options_(options),
      actions_(actions),
      survey_(survey),
      membership_(survey.membership()),
      plan_(std::move(plan)),
      begin_(now),
      deadline_(now + options.prepare_timeout +
                absl::Seconds(static_cast<double>(tokens.size()) * kPrepareSecondsPerToken)),
      hang_timeout_(HangTimeout(plan_, options)),
      still_since_(now) {
  const std::vector<SeatsOfWorker> seated = SeatWorkers(workers, plan_.ranks());
  if (options_.shares_weights) weight_shares_ = static_cast<int>(seated.size());
  for (const auto& [worker, first, count] : seated) {
    const v1::Join& offer = worker->offer;
    messages_mix_ = messages_mix_ && offer.messages_mix();
    seats_.resize(first + count, Seat{.worker = worker->connection, .moved_at = now});
    const int share = static_cast<int>(parts_.size());
    parts_[worker->connection] = {.name = offer.name(),
                                  .host = offer.host(),
                                  .rank_peak_flops = offer.peak_flops() / offer.ranks(),
                                  .first_rank = first,
                                  .ranks = count,
                                  .over_gloo = offer.data_plane() == kGlooDataPlane,
                                  .encrypts = offer.encrypt(),
                                  .weight_share = share};
    unanswered_.insert(worker->connection);
  }
  if (!messages_mix_) pauses_.Set(true, now);
  for (const SeatsOfWorker& of : seated) {
    SendPrepare(of.worker->connection, parts_.at(of.worker->connection), tokens, kv);
  }
}

// The plan, then the tokens of this worker's ranks.
void RunCoordinator::SendPrepare(Connection worker, Part& part, std::span<const uint32_t> tokens,
                                 const KvDirectory::RunKv& kv) {
  v1::Prepare& prepare = *AddMessage(worker).mutable_prepare();
  prepare.set_run(number_);
  *prepare.mutable_plan() = ToRunPlan(plan_);
  prepare.set_first_rank(static_cast<uint32_t>(part.first_rank));
  prepare.set_ranks(static_cast<uint32_t>(part.ranks));
  if (kv.keep.has_value()) *prepare.mutable_keep_kv() = *kv.keep;
  if (weight_shares_ > 0) {
    const int last_rank = plan_.layout.RankOf(plan_.layout.tokens() - 1);
    prepare.set_weight_share(static_cast<uint32_t>(part.weight_share));
    prepare.set_weight_shares(static_cast<uint32_t>(weight_shares_));
    prepare.set_weight_head_share(
        static_cast<uint32_t>(parts_.at(seats_[plan_.SeatOf(last_rank)].worker).weight_share));
  }
  prepare.mutable_prefix()->Assign(kv.prefix.begin(), kv.prefix.end());
  prepare.set_more_pieces(options_.tokens_ahead > 0);
  prepare.set_tokens_ahead(static_cast<uint64_t>(options_.tokens_ahead));
  if (options_.pack.number != 0) {
    prepare.set_local_rank(static_cast<uint32_t>(options_.pack.local_rank));
    prepare.set_pack(options_.pack.number);
    prepare.set_pack_runs(static_cast<uint32_t>(options_.pack.runs));
  }
  prepare.set_reserve_bytes(static_cast<uint64_t>(ReservedBytes(plan_, part.ranks)));
  std::vector<std::vector<uint32_t>> shards;
  for (int seat = part.first_rank; seat < part.first_rank + part.ranks; ++seat) {
    const std::vector<uint32_t>& ids = shards.emplace_back(plan_.layout.Deal(plan_.RankAt(seat), tokens));
    for (size_t begin = 0; begin < ids.size(); begin += kShardIds) {
      const size_t end = std::min(ids.size(), begin + kShardIds);
      v1::Shard& shard = *AddMessage(worker).mutable_shard();
      shard.set_run(number_);
      shard.set_rank(static_cast<uint32_t>(seat));
      shard.set_begin(begin);
      shard.mutable_ids()->Add(ids.begin() + static_cast<ptrdiff_t>(begin),
                               ids.begin() + static_cast<ptrdiff_t>(end));
    }
  }
  part.expected_hash = RunHash(plan_, part.first_rank, shards);
}

RunCoordinator::Outcome RunCoordinator::OnPrepared(Connection worker, const v1::Prepared& message,
                                                   absl::Time now) {
  if (phase_ != Phase::kPreparing || !unanswered_.contains(worker)) return {};
  Part& part = parts_.at(worker);
  if (const absl::Status status = FromOutcome(message.outcome()); !status.ok()) {
    if (IsRetryable(status.code())) {
      return WorkersFailed{{worker}, std::string(status.message()), /*keep_out=*/true};
    }
    return RequestFailed{WithWorkerName(part.name, status), /*unprepared=*/worker};
  }
  const bool has_peers = options_.pack.number == 0;
  const int addresses = has_peers ? part.ranks + (options_.shares_weights ? 1 : 0) : 0;
  if (message.hash() != part.expected_hash || message.addresses_size() != addresses) {
    return WorkersFailed{{worker}, "it prepared another run than the one it was sent", /*keep_out=*/true};
  }
  const absl::Status good = has_peers ? CheckAddresses(part, message) : absl::OkStatus();
  if (!good.ok()) {
    return WorkersFailed{{worker}, std::string(good.message()), /*keep_out=*/true};
  }
  unanswered_.erase(worker);
  for (int i = 0; has_peers && i < part.ranks; ++i) {
    seats_[part.first_rank + i].address = message.addresses(i);
  }
  if (options_.shares_weights) part.weight_address = message.addresses(part.ranks);
  if (unanswered_.empty() && !pauses_.paused()) SendRun(now);
  return {};
}

// Else its peers would find out, and nobody could tell which of them to believe.
absl::Status RunCoordinator::CheckAddresses(const Part& part, const v1::Prepared& message) const {
  if (!part.over_gloo) return absl::OkStatus();
  const auto check = [&](int index, Traffic traffic, int rank) {
    const absl::Status good = CheckGlooAddress(message.addresses(index),
                                               DataPlaneRun(epoch_, number_, traffic), rank, part.encrypts);
    if (good.ok()) return good;
    return absl::InvalidArgumentError(absl::StrCat("its data address of rank ", rank, " ", good.message()));
  };
  for (int i = 0; i < part.ranks; ++i) {
    RETURN_IF_ERROR(check(i, Traffic::kQ, plan_.RankAt(part.first_rank + i)));
  }
  return options_.shares_weights ? check(part.ranks, Traffic::kGather, part.weight_share) : absl::OkStatus();
}

void RunCoordinator::SendRun(absl::Time now) {
  phase_ = Phase::kRunning;
  runs_since_ = now - pauses_.Total(now);
  for (Seat& seat : seats_) seat.moved_at = now;
  std::map<std::string, int> host_numbers;
  std::vector<int> host_of_rank;
  for (int rank = 0; rank < plan_.ranks(); ++rank) {
    const std::string& host = parts_.at(seats_[plan_.SeatOf(rank)].worker).host;
    host_of_rank.push_back(host_numbers.emplace(host, std::ssize(host_numbers)).first->second);
  }
  if (membership_ == survey_.membership()) probes_ = survey_.Ask(std::move(host_of_rank));
  std::vector<std::string> weight_addresses(weight_shares_);
  if (options_.shares_weights) {
    for (const auto& [worker, part] : parts_) weight_addresses[part.weight_share] = part.weight_address;
  }
  for (const auto& [worker, part] : parts_) {
    v1::Run& run = *AddMessage(worker).mutable_run();
    run.set_run(number_);
    for (int rank = 0; rank < plan_.ranks(); ++rank) {
      run.add_addresses(seats_[plan_.SeatOf(rank)].address);
    }
    for (const std::string& address : weight_addresses) run.add_addresses(address);
    for (const LinkProbe& probe : probes_.pairs) {
      run.add_probes()->mutable_peers()->Assign(probe.peer_of_rank.begin(), probe.peer_of_rank.end());
    }
  }
}

RunCoordinator::Outcome RunCoordinator::OnProgress(Connection worker, const v1::WorkerProgress& message,
                                                   absl::Time now) {
  for (const v1::WorkerProgress::Rank& rank : message.ranks()) {
    if (rank.rank() >= seats_.size() || seats_[rank.rank()].worker != worker) continue;
    Seat& seat = seats_[rank.rank()];
    seat.has_computed |= rank.has_computed();
    if (phase_ != Phase::kRunning) continue;
    if (rank.operations() > seat.operations) {
      seat.operations = rank.operations();
      seat.moved_at = now;
    }
    seat.computing = rank.computing();
    seat.heard = Computed(now);
    seat.layers_done =
        std::max(seat.layers_done, std::min(static_cast<int>(rank.layers_done()), options_.layers));
  }
  if (phase_ != Phase::kRunning) return {};
  const auto last = std::min_element(seats_.begin(), seats_.end(), [](const Seat& a, const Seat& b) {
    return a.layers_done < b.layers_done;
  });
  if (last->layers_done <= layers_done_) return {};
  layers_done_ = last->layers_done;
  return LayersDone{layers_done_};
}

RunCoordinator::Outcome RunCoordinator::OnRankDone(Connection worker, const v1::RankDone& message,
                                                   absl::Time now) {
  if (phase_ != Phase::kRunning || message.rank() >= seats_.size()) return {};
  Seat& seat = seats_[message.rank()];
  if (seat.worker != worker || seat.done) return {};
  if (const absl::Status status = FromOutcome(message.outcome()); !status.ok()) {
    const absl::Status named = WithWorkerName(
        parts_.at(worker).name,
        absl::Status(status.code(), absl::StrCat("rank ", message.rank(), ": ", status.message())));
    if (IsRetryable(status.code())) return RunFailed{std::string(named.message())};
    return RequestFailed{named};
  }
  seat.done = true;
  seat.stats = FromProto(message.stats());
  seat.links = FromProto(message.links());
  seat.probe_seconds = message.probe_seconds();
  if (message.logits_size() > 0) logits_.assign(message.logits().begin(), message.logits().end());
  if (!std::all_of(seats_.begin(), seats_.end(), [](const Seat& each) { return each.done; })) return {};
  return Finish(now);
}

RunCoordinator::Outcome RunCoordinator::Finish(absl::Time now) {
  RunResult result{.plan = std::move(plan_), .logits = std::move(logits_)};
  result.seconds = absl::ToDoubleSeconds(now - begin_ - pauses_.Total(now));
  result.cached_tokens = result.plan.cached_tokens;
  result.pool_ranks = options_.pool_ranks;
  TakeLinks(result);
  for (const Seat& seat : seats_) {
    result.ranks.push_back(seat.stats);
    result.peak_flops += parts_.at(seat.worker).rank_peak_flops;
  }
  for (const auto& [worker, part] : parts_) AddMessage(worker).mutable_finish()->set_run(number_);
  const int64_t logits = options_.tokens_ahead > 0 ? 0 : options_.vocab;
  if (std::ssize(result.logits) == logits) return Completed{std::move(result)};
  return Completed{
      absl::InternalError(absl::StrCat("the run ended with ", result.logits.size(), " logits instead of ",
                                       logits, "; this is a bug of Meshfill: please report it"))};
}

// What the run's ranks measured is for the plans to come; the time that it took is none of the request's.
void RunCoordinator::TakeLinks(RunResult& result) {
  if (probes_.pairs.empty()) return;
  std::vector<LinkSurvey::RankLinks> by_rank;
  double seconds = 0;
  for (int rank = 0; rank < result.plan.ranks(); ++rank) {
    Seat& seat = seats_[result.plan.SeatOf(rank)];
    by_rank.push_back(std::move(seat.links));
    if (seat.probe_seconds > seconds && seat.probe_seconds < result.seconds) seconds = seat.probe_seconds;
  }
  actions_.Log(
      absl::StrCat(survey_.Take(probes_, by_rank), "; it took ",
                   absl::FormatDuration(absl::Trunc(absl::Seconds(seconds), absl::Milliseconds(1)))));
  result.seconds -= seconds;
  result.probed = true;
}

void RunCoordinator::SetPaused(bool paused, absl::Time now) {
  if (paused == pauses_.paused() || phase_ == Phase::kStopping) return;
  const absl::Duration pause = pauses_.Current(now);
  pauses_.Set(paused, now);
  if (phase_ == Phase::kPreparing) {
    if (!paused && unanswered_.empty()) SendRun(now);
    return;
  }
  // What hangs gains nothing by pauses.
  for (Seat& seat : seats_) seat.moved_at = std::min(now, seat.moved_at + pause);
  SendPause(paused);
}

void RunCoordinator::SendPause(bool paused) {
  if (!messages_mix_ && paused) {
    ++pause_number_;
    halt_ = Halt::kAsking;
    messages_begun_ = 0;
    not_paused_.clear();
  }
  for (const auto& [worker, part] : parts_) {
    v1::LeaderMessage& message = AddMessage(worker);
    if (!paused) {
      message.mutable_resume()->set_run(number_);
      continue;
    }
    message.mutable_pause()->set_run(number_);
    if (messages_mix_) continue;
    message.mutable_pause()->set_number(pause_number_);
    not_paused_.insert(worker);
  }
}

void RunCoordinator::OnPaused(Connection worker, const v1::Paused& message, absl::Time now) {
  if (phase_ != Phase::kRunning || !pauses_.paused() || message.number() != pause_number_) return;
  if (halt_ != (message.still() ? Halt::kHalting : Halt::kAsking)) return;  // it comes twice
  if (halt_ == Halt::kAsking) messages_begun_ = std::max(messages_begun_, message.messages());
  not_paused_.erase(worker);
  MaybeHalt(now);
}

void RunCoordinator::MaybeHalt(absl::Time now) {
  if (!not_paused_.empty()) return;
  if (halt_ == Halt::kHalting) {
    halt_ = Halt::kStill;
    still_since_ = now;
    return;
  }
  halt_ = Halt::kHalting;
  for (const auto& [worker, part] : parts_) {
    v1::PauseAt& at = *AddMessage(worker).mutable_pause_at();
    at.set_run(number_);
    at.set_number(pause_number_);
    at.set_messages(messages_begun_);
    not_paused_.insert(worker);
  }
}

bool RunCoordinator::StandsStill() const {
  if (phase_ == Phase::kStopping) return unanswered_.empty();
  return pauses_.paused() && (phase_ == Phase::kPreparing || messages_mix_ || halt_ == Halt::kStill);
}

void RunCoordinator::Abort(const std::string& why, absl::Time now) {
  if (phase_ == Phase::kStopping) return;
  BeginStopping(now);
  for (Connection worker : unanswered_) {
    v1::Abort& abort = *AddMessage(worker).mutable_abort();
    abort.set_run(number_);
    abort.set_reason(why);
  }
}

void RunCoordinator::Cancel(absl::Time now) {
  if (phase_ == Phase::kStopping) return;
  BeginStopping(now);
  for (Connection worker : unanswered_) AddMessage(worker).mutable_cancel()->set_run(number_);
}

// Everybody who takes part and is still in the pool must confirm.
void RunCoordinator::BeginStopping(absl::Time now) {
  stopped_still_ = StandsStill();
  phase_ = Phase::kStopping;
  // A device ends the blocks that it was given before it looks at the stop.
  deadline_ = now + std::max(options_.stop_timeout, hang_timeout_);
  unanswered_.clear();
  for (const auto& [worker, part] : parts_) unanswered_.insert(worker);
}

void RunCoordinator::OnStopped(Connection worker) {
  if (phase_ == Phase::kStopping) unanswered_.erase(worker);
}

// The layers that it has done, and as many more as it can have done unheard, at the pace of those.
PromptPlace RunCoordinator::PlaceOfEnd(absl::Time now, absl::Duration delay) const {
  PromptPlace place{.first_token = plan_.cached_tokens,
                    .last_token = plan_.cached_tokens + plan_.layout.tokens() - 1,
                    .first_layer = layers_done_,
                    .last_layer = options_.layers};
  absl::Duration heard = absl::InfiniteDuration();
  for (const Seat& seat : seats_) heard = std::min(heard, seat.heard - delay);
  if (heard <= absl::ZeroDuration()) return place;
  const double layers = std::ceil((layers_done_ + 1) * absl::FDivDuration(Computed(now) - heard, heard));
  if (layers < options_.layers - layers_done_) place.last_layer = layers_done_ + static_cast<int>(layers);
  return place;
}

void RunCoordinator::OnLeaderStoodStill(absl::Duration stood, absl::Time now) {
  deadline_ += stood;
  for (Seat& seat : seats_) seat.moved_at = std::min(now, seat.moved_at + stood);
}

bool RunCoordinator::HasComputed() const {
  return std::all_of(seats_.begin(), seats_.end(),
                     [](const Seat& seat) { return seat.has_computed || seat.done; });
}

bool RunCoordinator::Shares(const RunCoordinator& other) const {
  return std::any_of(seats_.begin(), seats_.end(), [&](const Seat& own) {
    return std::any_of(other.seats_.begin(), other.seats_.end(),
                       [&](const Seat& seat) { return seat.worker == own.worker; });
  });
}

absl::Duration RunCoordinator::PackTimeout() const {
  const bool waits = options_.pack.runs > 1 && seats_.front().operations == 0;
  return waits ? options_.prepare_timeout : absl::ZeroDuration();
}

void RunCoordinator::OnWorkerLost(Connection worker) {
  parts_.erase(worker);
  unanswered_.erase(worker);
  not_paused_.erase(worker);
}

RunCoordinator::Outcome RunCoordinator::OnTick(absl::Time now) const {
  if (phase_ != Phase::kRunning) {
    if (now < deadline_ || unanswered_.empty()) return {};
    if (phase_ == Phase::kStopping) return WorkersFailed{unanswered_, "it did not stop in time"};
    return WorkersFailed{unanswered_, "it did not prepare in time", /*keep_out=*/true};
  }
  if (StandsStill()) return {};
  std::set<Connection> hung;
  absl::Time last_move = absl::InfinitePast();
  for (const Seat& seat : seats_) {
    if (seat.done) continue;
    last_move = std::max(last_move, seat.moved_at);
    if (seat.computing && now - seat.moved_at >= hang_timeout_) hung.insert(seat.worker);
  }
  if (!hung.empty()) {
    return WorkersFailed{
        hung, absl::StrCat("its compute loop stood still for ", absl::FormatDuration(hang_timeout_))};
  }
  // All wait for each other and no stream has ended: chunks get lost between them.
  if (now - last_move >= 2 * hang_timeout_ + PackTimeout()) return RunFailed{"no rank makes progress"};
  return {};
}

}  // namespace meshfill
