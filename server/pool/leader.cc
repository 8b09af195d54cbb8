#include "server/pool/leader.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr int kMaxLosses = 6;  // of one request's runs, those that ended before they began included

Leader::WorkerState StateIn(RunCoordinator::Phase phase) {
  switch (phase) {
    case RunCoordinator::Phase::kPreparing:
      return Leader::WorkerState::kPreparing;
    case RunCoordinator::Phase::kRunning:
      return Leader::WorkerState::kRunning;
    case RunCoordinator::Phase::kStopping:
      return Leader::WorkerState::kStopping;
  }
  return Leader::WorkerState::kReady;
}

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

Leader::Leader(const Options& options, PoolPlanner planner)
    : options_(options),
      members_({.build = options.build,
                .model = options.model,
                .encrypt = options.encrypt,
                .first_epoch = options.first_epoch,
                .least_memory_bytes = options.least_memory_bytes,
                .silence_timeout = options.silence_timeout,
                .join_timeout = options.join_timeout,
                .least_kept_out = options.least_kept_out,
                .most_kept_out = options.most_kept_out},
               actions_),
      kv_(options.kv, options.kv_cache, actions_),
      survey_(options.links),
      placer_(std::move(planner), members_, survey_, live_, kv_) {}

// ---- Workers.

void Leader::OnConnected(Connection connection, absl::Time now) { members_.OnConnected(connection, now); }

void Leader::OnMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now) {
  Membership::Worker* worker = members_.Find(connection);
  if (worker == nullptr) {
    if (!members_.OnStrangerMessage(connection, message, now)) return;
    kv_.OnWorkersChanged(members_.ByPlace());
    LookForRoomAgain();
    return StartWaiting(now);
  }
  worker->heard_at = now;
  if (message.epoch() > epoch()) {
    return DropWorkers({connection},
                       absl::StrCat("it speaks of epoch ", message.epoch(), " in epoch ", epoch()), now);
  }
  if (message.has_leave()) {
    members_.OnLeave(*worker);
    kv_.OnWorkersChanged(members_.ByPlace());
    return ForgetStoppedRuns();
  }
  if (LiveRun* run = RunOf(message); run != nullptr && run->coordinator.Has(connection)) {
    Apply(run->coordinator.number(), OnRunMessage(connection, message, now), now);
  }
}

LiveRun* Leader::RunOf(const v1::WorkerMessage& message) {
  RunId number = 0;
  if (message.has_prepared()) number = message.prepared().run();
  if (message.has_progress()) number = message.progress().run();
  if (message.has_rank_done()) number = message.rank_done().run();
  if (message.has_stopped()) number = message.stopped().run();
  if (message.has_paused()) number = message.paused().run();
  const auto run = live_.runs.find(number);
  if (run == live_.runs.end() || run->second.coordinator.epoch() != message.epoch()) return nullptr;
  return &run->second;
}

RunCoordinator::Outcome Leader::OnRunMessage(Connection connection, const v1::WorkerMessage& message,
                                             absl::Time now) {
  RunCoordinator& run = RunOf(message)->coordinator;
  switch (message.body_case()) {
    case v1::WorkerMessage::kPrepared:
      return run.OnPrepared(connection, message.prepared(), now);
    case v1::WorkerMessage::kProgress:
      return run.OnProgress(connection, message.progress(), now);
    case v1::WorkerMessage::kRankDone:
      if (live_.Find(RunOf(message)->ticket) == nullptr) {  // another of its pass was waited for
        CancelRun(*RunOf(message), now);
        return {};
      }
      return run.OnRankDone(connection, message.rank_done(), now);
    case v1::WorkerMessage::kPaused:
      run.OnPaused(connection, message.paused(), now);
      return {};
    case v1::WorkerMessage::kStopped:
      run.OnStopped(connection);
      return {};
    case v1::WorkerMessage::kJoin:
    case v1::WorkerMessage::kLeave:
    case v1::WorkerMessage::BODY_NOT_SET:
      break;
  }
  return {};
}

void Leader::OnDisconnected(Connection connection, absl::Time now) {
  members_.OnStrangerGone(connection);
  if (members_.Find(connection) != nullptr) DropWorkers({connection}, "its stream ended", now);
}

void Leader::OnTick(absl::Time now) {
  members_.RefuseUnjoined(now);
  if (const std::set<Connection> silent = members_.Silent(now); !silent.empty()) {
    DropWorkers(silent, absl::StrCat("silent for ", absl::FormatDuration(options_.silence_timeout)), now);
  }
  RefuseOverdue(now);
  std::vector<RunId> runs;
  for (const auto& [number, run] : live_.runs) runs.push_back(number);
  for (RunId number : runs) {
    const auto run = live_.runs.find(number);  // another's complaint may have ended it
    if (run != live_.runs.end()) Take(number, run->second.coordinator.OnTick(now), now);
  }
  StartWaiting(now);
  kv_.EndLapsed(now);
  ForgetStoppedRuns();  // who drains may have held what lapsed or was released
  if (now - last_heartbeat_ < options_.heartbeat_interval) return;
  last_heartbeat_ = now;
  for (const auto& [connection, worker] : members_.all()) {
    actions_.AddMessage(connection, epoch()).mutable_heartbeat();
  }
}

void Leader::DropWorkers(const std::set<Connection>& connections, const std::string& why, absl::Time now) {
  NoteWhoHasWorkers(now);
  std::map<RunId, std::string> runs;  // runs that they took part in, and the names of those who did
  for (Connection connection : connections) {
    const std::string name = members_.Remove(connection, why);
    kv_.OnWorkerLost(connection, name, why);
    for (auto& [number, run] : live_.runs) {
      if (!run.coordinator.Has(connection)) continue;
      run.coordinator.OnWorkerLost(connection);
      std::string& names = runs[number];
      absl::StrAppend(&names, names.empty() ? "" : ", ", name);
    }
  }
  for (auto& [ticket, request] : live_.requests) {
    const auto has = [&pieces = request.pieces](Connection lost) { return pieces->Has(lost); };
    const bool has_part =
        request.pieces.has_value() && std::any_of(connections.begin(), connections.end(), has);
    if (!has_part) continue;
    request.pieces.reset();
    request.new_attempt = true;
  }
  kv_.OnWorkersChanged(members_.ByPlace());
  LookForRoomAgain();
  for (const auto& [number, names] : runs) {
    EndEpoch(number, absl::StrCat("worker ", names, " is lost: ", why), /*lost_workers=*/true, now);
  }
  ForgetStoppedRuns();
  StartWaiting(now);
}

// ---- Requests.

Leader::Ticket Leader::Submit(const Request& request, absl::Time now) {
  const Ticket ticket = ++last_ticket_;
  live_.requests.emplace(ticket, LiveRequest{.request = request, .had_workers_at = now});
  StartWaiting(now);
  return ticket;
}

std::vector<Leader::Ticket> Leader::SubmitPack(const std::vector<PackedRequest>& requests, double seconds,
                                               absl::Time now) {
  if (live_.count() >= options_.runs_at_once) return {};
  PackSeat seat = {.pack = ++last_pack_, .prompts = static_cast<int>(requests.size()), .seconds = seconds};
  std::map<int, int> prompts_of_rank;
  for (const PackedRequest& each : requests) ++prompts_of_rank[each.rank];
  std::vector<Ticket> tickets;
  for (const PackedRequest& each : requests) {
    const std::optional<std::pair<Connection, int>> place = placer_.PlaceOfRank(each.rank);
    if (!place.has_value()) break;
    seat.rank = each.rank;
    seat.rank_prompts = prompts_of_rank.at(each.rank);
    seat.share = each.share;
    std::tie(seat.worker, seat.local_rank) = *place;
    const Ticket ticket = ++last_ticket_;
    live_.requests.emplace(ticket, LiveRequest{.request = each.request, .pack = seat, .had_workers_at = now});
    tickets.push_back(ticket);
    StartRun(ticket, now);
    if (run_of(ticket) == 0) break;
  }
  const bool all = tickets.size() == requests.size() && run_of(tickets.back()) != 0;
  if (!all) {
    for (const Ticket ticket : tickets) {  // nobody waits for their answers; their leases keep their room
      const RunId run = run_of(ticket);
      live_.requests.erase(ticket);
      if (run == 0) continue;
      live_.runs.at(run).coordinator.Cancel(now);
      kv_.UndoRun(run);
    }
    tickets.clear();
  }
  StartWaiting(now);
  return tickets;
}

void Leader::CancelRequest(Ticket ticket, absl::Status reason, absl::Time now) {
  const LiveRequest* request = live_.Find(ticket);
  if (request == nullptr) return;
  const auto run = live_.runs.find(request->run);
  AnswerRequest(ticket, std::move(reason));
  if (run != live_.runs.end()) {
    LeaveRun(run->first, now);
    ForgetStoppedRuns();
  }
  StartWaiting(now);
}

void Leader::LeaveRun(RunId run, absl::Time now) {
  if (!live_.IsWanted(run)) CancelUnwanted(live_.InPassOf(run), now);
}

void Leader::CancelUnwanted(const std::vector<RunId>& in_pass, absl::Time now) {
  for (const RunId run : in_pass) {
    if (live_.Find(live_.runs.at(run).ticket) == nullptr) CancelRun(live_.runs.at(run), now);
  }
}

void Leader::CancelRun(LiveRun& run, absl::Time now) {
  run.coordinator.Cancel(now);
  kv_.OnRunFailed(run.coordinator.number(), "it was cancelled", /*again_on=*/{});
}

void Leader::SetPaused(Ticket ticket, bool paused, absl::Time now) {
  LiveRequest* request = live_.Find(ticket);
  if (request == nullptr || request->pauses.paused() == paused) return;
  request->pauses.Set(paused, now);
  StartWaiting(now);
}

bool Leader::CrowdedOut(Ticket ticket) const {
  return Waits(ticket) && !live_.runs.empty() && !live_.AnyStops();
}

bool Leader::Undecided(Ticket ticket) const { return Waits(ticket) && live_.AnyStops(); }

bool Leader::Waits(Ticket ticket) const {
  const LiveRequest* request = live_.Find(ticket);
  return request != nullptr && request->waits();
}

RunId Leader::run_of(Ticket ticket) const {
  const LiveRequest* request = live_.Find(ticket);
  return request != nullptr ? request->run : 0;
}

uint64_t Leader::PlaceOf(Ticket ticket) const {
  const auto run = live_.runs.find(run_of(ticket));
  return run != live_.runs.end() ? run->second.coordinator.a_worker() : 0;
}

void Leader::AnswerRequest(Ticket ticket, absl::StatusOr<Result> result) {
  if (live_.requests.erase(ticket) > 0) actions_.Add(Answer{ticket, std::move(result)});
}

void Leader::NoteWhoHasWorkers(absl::Time now) {
  for (auto& [ticket, request] : live_.requests) {
    const bool lacks_workers = request.waits() && request.has_turn() && placer_.WorkersFor(request).empty();
    if (!lacks_workers) request.had_workers_at = now;
  }
}

void Leader::RefuseOverdue(absl::Time now) {
  NoteWhoHasWorkers(now);
  std::vector<Ticket> overdue;
  for (const auto& [ticket, request] : live_.requests) {
    const bool too_long = now - request.had_workers_at >= options_.empty_timeout;
    if (too_long) overdue.push_back(ticket);
  }
  for (Ticket ticket : overdue) {
    AnswerRequest(ticket,
                  absl::UnavailableError(absl::StrCat("the pool has no workers, and none joined within ",
                                                      absl::FormatDuration(options_.empty_timeout),
                                                      "; start some, or try again later")));
  }
  if (!overdue.empty()) StartWaiting(now);  // of those behind it, one may have workers that drain
}

// ---- Runs.

// The policy of what lives at once: the oldest requests whose turn it is, as many as the options and the
// workers' memory allow. A run that is being stopped counts.
void Leader::StartWaiting(absl::Time now) {
  while (auto* next = live_.FirstWaiting()) {
    auto& [ticket, request] = *next;
    if (request.no_room || placer_.WorkersFor(request).empty()) break;  // OnTick ends the wait for a worker
    if (live_.count() >= options_.runs_at_once) {
      request.no_room = true;
    } else {
      StartRun(ticket, now);
    }
  }
  live_.Pause(now);
}

// Begins a run for the request, or answers it.
void Leader::StartRun(Ticket ticket, absl::Time now) {
  LiveRequest& request = live_.requests.at(ticket);
  if (request.losses >= kMaxLosses) {
    return AnswerRequest(
        ticket, absl::UnavailableError(absl::StrCat("the pool lost workers in each of ", request.losses,
                                                    " attempts at this request; try again later")));
  }
  const RunId number = last_run_ + 1;
  absl::StatusOr<std::optional<PlacedRun>> placed = placer_.Place(number, request);
  if (placed.ok() && !placed->has_value()) {
    request.no_room = true;
    return;
  }
  if (!placed.ok()) {
    const bool shrunk = request.attempts > 0 && absl::IsInvalidArgument(placed.status());
    return AnswerRequest(ticket, shrunk ? absl::UnavailableError(absl::StrCat(
                                              "the pool lost workers and now ", placed.status().message()))
                                        : placed.status());
  }
  if (members_.BeginRun()) survey_.AskAgain();
  if (std::exchange(request.new_attempt, false)) BeginAttempt(request, now);
  request.run = last_run_ = number;
  const int64_t tokens_ahead = request.pieces.has_value() ? request.pieces->tokens_ahead() : 0;
  PlacedRun& run = **placed;
  const RunCoordinator::Options options = {
      .layers = options_.kv.layers,
      .vocab = options_.vocab,
      .shares_weights = run.shares_weights,
      .tokens_ahead = tokens_ahead,
      .pool_ranks = request.pack.has_value() ? std::vector<int>{request.pack->rank}
                                             : PoolRanks(members_.ByPlace(), run.workers, run.plan.ranks()),
      .pack = request.pack.has_value() ? RunCoordinator::Pack{.number = request.pack->pack,
                                                              .local_rank = request.pack->local_rank,
                                                              .runs = request.pack->rank_prompts}
                                       : RunCoordinator::Pack(),
      .hang_timeout = options_.hang_timeout,
      .prepare_timeout = options_.prepare_timeout,
      .stop_timeout = options_.stop_timeout};
  const auto first = static_cast<size_t>(run.plan.cached_tokens);
  const auto tokens = request.request.tokens.subspan(first, static_cast<size_t>(run.plan.layout.tokens()));
  live_.runs.emplace(
      number, LiveRun{.ticket = ticket,
                      .coordinator = RunCoordinator(number, epoch(), std::move(run.plan), tokens, run.workers,
                                                    run.kv, options, actions_, survey_, now),
                      .pack = request.pack});
}

void Leader::BeginAttempt(LiveRequest& request, absl::Time now) {
  if (request.attempts++ > 0) ++retries_;
  if (request.attempts == 1) {
    request.begin = now;
    request.pauses = {};
  }
  // Pieces may have run on while their request was asked to stand still.
  const double counted = request.pieces.has_value() ? request.pieces->seconds() : 0;
  const double lost = absl::ToDoubleSeconds(now - request.begin - request.pauses.Total(now)) - counted;
  request.lost_seconds = std::max(0.0, lost);
}

void Leader::Apply(RunId run, RunCoordinator::Outcome outcome, absl::Time now) {
  Take(run, std::move(outcome), now);
  ForgetStoppedRuns();
  StartWaiting(now);
}

void Leader::Take(RunId run, RunCoordinator::Outcome outcome, absl::Time now) {
  const auto live = live_.runs.find(run);
  if (live != live_.runs.end() && live->second.coordinator.phase() == RunCoordinator::Phase::kRunning) {
    kv_.OnRunning(run);
  }
  std::visit([&](auto& what) { Do(run, what, now); }, outcome);
}

void Leader::Do(RunId run, RunCoordinator::LayersDone& done, absl::Time) {
  const Ticket ticket = live_.runs.at(run).ticket;
  const LiveRequest* request = live_.Find(ticket);
  const PromptPieces* pieces =
      request != nullptr && request->pieces.has_value() ? &*request->pieces : nullptr;
  const int before = pieces != nullptr ? pieces->done() : 0, count = pieces != nullptr ? pieces->count() : 1;
  const int layers = options_.kv.layers, attempt = request != nullptr ? request->attempts : 1;
  actions_.Add(LayersDone{ticket, before * layers + done.layers, count * layers, attempt});
  kv_.OnLayersDone(run, done.layers);
}

void Leader::Do(RunId run, RunCoordinator::Completed& completed, absl::Time now) {
  // The last layer's end comes with the ranks' answers, often before any word of progress.
  RunCoordinator::LayersDone all{options_.kv.layers};
  if (completed.result.ok() && live_.runs.at(run).coordinator.layers_done() < all.layers) Do(run, all, now);
  const Ticket ticket = live_.runs.at(run).ticket;
  KvSlabs kept = kv_.OnRunOver(run, members_.ByPlace());
  std::vector<RunId> others = live_.InPassOf(run);
  std::erase(others, run);
  Forget(run);
  if (LiveRequest* request = live_.Find(ticket); request != nullptr && completed.result.ok()) {
    if (request->pieces.has_value()) {
      PromptPieces& pieces = *request->pieces;
      if (!pieces.last()) {
        pieces.OnDone(*std::move(completed.result), std::move(kept));
        request->run = 0;
        return;
      }
      completed.result = pieces.Finish(*std::move(completed.result));
    }
    if (request->pack.has_value()) {
      completed.result->pack_prompts = request->pack->prompts;
      completed.result->pack_share = request->pack->share;
    }
    completed.result->attempts = request->attempts;
    completed.result->lost_seconds = request->lost_seconds;
    completed.result->paused_seconds = absl::ToDoubleSeconds(request->pauses.Total(now));
  }
  AnswerRequest(ticket, std::move(completed.result));
  if (!others.empty() && !live_.IsWanted(others.front())) CancelUnwanted(others, now);
}

void Leader::Do(RunId run, RunCoordinator::RequestFailed& failed, absl::Time now) {
  // What fails beside others may go well by itself, on all ranks.
  if (live_.runs.at(run).pack.has_value()) {
    return EndEpoch(run, std::string(failed.status.message()), /*lost_workers=*/false, now);
  }
  AnswerRequest(live_.runs.at(run).ticket, failed.status);
  CancelRun(live_.runs.at(run), now);
}

void Leader::Do(RunId run, RunCoordinator::RunFailed& failed, absl::Time now) {
  EndEpoch(run, failed.why, /*lost_workers=*/false, now);
}

void Leader::Do(RunId, RunCoordinator::WorkersFailed& failed, absl::Time now) {
  if (failed.keep_out) {
    for (Connection connection : failed.workers) members_.KeepOut(connection, now);
  }
  DropWorkers(failed.workers, failed.why, now);
}

void Leader::EndEpoch(RunId number, const std::string& why, bool lost_workers, absl::Time now) {
  const std::vector<RunId> in_pass = live_.InPassOf(number);
  const RunCoordinator& run = live_.runs.at(number).coordinator;
  if (run.phase() != RunCoordinator::Phase::kStopping) {
    const std::string others =
        in_pass.size() > 1 ? absl::StrCat(", and in ", in_pass.size() - 1, " others of its pass") : "";
    actions_.Log(absl::StrCat("epoch ", run.epoch(), " ended in run ", number, others, ": ", LogQuote(why)),
                 LogLevel::kWarning);
  }
  for (const RunId each : in_pass) EndEpochOf(each, why, lost_workers, now);
}

void Leader::EndEpochOf(RunId number, const std::string& why, bool lost_workers, absl::Time now) {
  auto& [ticket, run, pack, doubtful] = live_.runs.at(number);
  const bool stops = run.phase() == RunCoordinator::Phase::kStopping;
  LiveRequest* request = live_.Find(ticket);
  std::optional<EpochEnd> end = stops ? std::exchange(doubtful, std::nullopt) : EndOf(run, now);
  if (end.has_value()) end->why = why;
  // A prompt does not keep its ranks from connecting. One may tell of a failure before the loss of a worker
  // shows, and before the others have said that they compute.
  if (!lost_workers && !run.HasComputed()) doubtful = std::exchange(end, std::nullopt);
  const std::string poisonous = request != nullptr && end.has_value() ? Blame(*request, *end) : "";
  if (!stops) {
    members_.EndEpoch();
    run.Abort(why, now);
    // What a prompt in pieces has stays charged in another way, by KeepPieces.
    const bool is_whole = request != nullptr && !request->pieces.has_value();
    kv_.OnRunFailed(number, why, is_whole ? members_.ByPlace() : KvDirectory::Workers());
    if (request != nullptr) {
      if (request->pack.has_value()) request->failed_pack = request->pack->pack;
      request->pack.reset();
      request->new_attempt = true;
      if (run.MayHaveComputed(now - options_.silence_timeout)) ++request->losses;
      placer_.KeepPieces(*request);
    }
  }
  if (!poisonous.empty()) AnswerRequest(ticket, absl::InternalError(poisonous));
}

std::optional<EpochEnd> Leader::EndOf(const RunCoordinator& run, absl::Time now) const {
  const absl::Time since = now - options_.silence_timeout;
  if (run.phase() != RunCoordinator::Phase::kRunning || !run.MayHaveComputed(since)) return std::nullopt;
  const bool alone = std::none_of(live_.runs.begin(), live_.runs.end(), [&](const auto& other) {
    return &other.second.coordinator != &run && other.second.coordinator.Shares(run) &&
           other.second.coordinator.MayHaveComputed(since);
  });
  return EpochEnd{.place = run.PlaceOfEnd(now, options_.silence_timeout), .alone = alone};
}

std::string Leader::Blame(LiveRequest& request, const EpochEnd& end) {
  if (!end.alone) {
    request.ended.Suspect(end.place);
    return "";
  }
  if (!request.ended.Blame(end.place)) return "";
  for (auto& [ticket, other] : live_.requests) other.ended.ForgetSuspicions();
  return absl::StrCat("request ", request.request.id,
                      " ended 2 epochs of the pool at the same place of its prompt and is refused as "
                      "poisonous; the last one: ",
                      end.why);
}

void Leader::Forget(RunId run) {
  live_.runs.erase(run);
  LookForRoomAgain();
}

void Leader::LookForRoomAgain() {
  for (auto& [ticket, request] : live_.requests) request.no_room = false;
}

// Their requests wait again, and who drained for them may go.
void Leader::ForgetStoppedRuns() {
  for (auto next = live_.runs.begin(); next != live_.runs.end();) {
    const auto run = next++;
    const auto& [ticket, coordinator, pack, doubtful] = run->second;
    if (!coordinator.stopped()) continue;
    if (LiveRequest* request = live_.Find(ticket)) {
      request->run = 0;
      const bool computed = doubtful.has_value() && coordinator.HasComputed();
      const std::string poisonous = computed ? Blame(*request, *doubtful) : "";
      if (!poisonous.empty()) AnswerRequest(ticket, absl::InternalError(poisonous));
    }
    Forget(run->first);
  }
  members_.ReleaseDrained([this](Connection connection) {
    return kv_.Holds(connection) || live_.HasPiecesOf(connection) || live_.TakesPart(connection);
  });
}

std::vector<Leader::WorkerView> Leader::workers() const {
  std::vector<const Membership::Worker*> all = members_.ByPlace();
  for (const auto& [connection, worker] : members_.all()) {
    if (worker.leaving) all.push_back(&worker);
  }
  std::vector<WorkerView> views;
  for (const Membership::Worker* worker : all) {
    WorkerView view{
        .offer = &worker->offer, .state = WorkerState::kReady, .first_rank = -1, .ranks_in_use = 0};
    const auto run = std::find_if(live_.runs.begin(), live_.runs.end(), [&](const auto& each) {
      return each.second.coordinator.Has(worker->connection);
    });
    if (run != live_.runs.end()) {
      const RunCoordinator& coordinator = run->second.coordinator;
      view.state = StateIn(coordinator.phase());
      view.first_rank = coordinator.first_rank(worker->connection);
      view.ranks_in_use = coordinator.ranks(worker->connection);
    }
    if (worker->leaving) view.state = WorkerState::kDraining;
    views.push_back(view);
  }
  return views;
}

}  // namespace meshfill
