#include "server/pool/leader.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

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
      live_(actions_),
      placer_(std::move(planner), members_, survey_, live_, kv_),
      starter_({.runs_at_once = options.runs_at_once,
                .layers = options.kv.layers,
                .vocab = options.vocab,
                .hang_timeout = options.hang_timeout,
                .prepare_timeout = options.prepare_timeout,
                .stop_timeout = options.stop_timeout},
               members_, survey_, live_, placer_, actions_),
      ender_(options.silence_timeout, members_, live_, placer_, kv_, actions_) {}

// ---- Workers.

void Leader::OnConnected(Connection connection, absl::Time now) { members_.OnConnected(connection, now); }

void Leader::OnMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now) {
  Membership::Worker* worker = members_.Find(connection);
  if (worker == nullptr) {
    if (!members_.OnStrangerMessage(connection, message, now)) return;
    kv_.OnWorkersChanged(members_.ByPlace());
    live_.LookForRoomAgain();
    return starter_.StartWaiting(now);
  }
  worker->heard_at = now;
  if (message.epoch() > epoch()) {
    return DropWorkers({connection},
                       absl::StrCat("it speaks of epoch ", message.epoch(), " in epoch ", epoch()), now);
  }
  if (message.has_leave()) {
    members_.OnLeave(*worker);
    kv_.OnWorkersChanged(members_.ByPlace());
    return ender_.ForgetStopped();
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
      if (message.prepared().outcome().code() == 0) members_.FailsToPrepare(connection, /*prepared=*/true);
      return run.OnPrepared(connection, message.prepared(), now);
    case v1::WorkerMessage::kProgress:
      return run.OnProgress(connection, message.progress(), now);
    case v1::WorkerMessage::kRankDone:
      if (live_.Find(RunOf(message)->ticket) == nullptr) {  // another of its pass was waited for
        ender_.Cancel(*RunOf(message), now);
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

void Leader::OnStoodStill(absl::Duration stood, absl::Time now) {
  members_.OnLeaderStoodStill(stood, now);
  for (auto& [number, run] : live_.runs) run.coordinator.OnLeaderStoodStill(stood, now);
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
  starter_.StartWaiting(now);
  kv_.EndLapsed(now);
  ender_.ForgetStopped();  // who drains may have held what lapsed or was released
  if (now - last_heartbeat_ < options_.heartbeat_interval) return;
  last_heartbeat_ = now;
  for (const auto& [connection, worker] : members_.all()) {
    actions_.AddMessage(connection, epoch()).mutable_heartbeat();
  }
}

void Leader::ForgetSpeeds() {
  for (const auto& [connection, worker] : members_.all()) {
    actions_.AddMessage(connection, epoch()).mutable_forget_speed();
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
  live_.LookForRoomAgain();
  for (const auto& [number, names] : runs) {
    ender_.EndEpoch(number, absl::StrCat("worker ", names, " is lost: ", why), /*lost_workers=*/true, now);
  }
  ender_.ForgetStopped();
  starter_.StartWaiting(now);
}

// ---- Requests.

Leader::Ticket Leader::Submit(const Request& request, absl::Time now) {
  const Ticket ticket = ++last_ticket_;
  live_.requests.emplace(ticket, LiveRequest{.request = request, .had_workers_at = now});
  starter_.StartWaiting(now);
  return ticket;
}

std::vector<Leader::Ticket> Leader::SubmitPack(const std::vector<PackedRequest>& requests, double seconds,
                                               absl::Time now) {
  if (!starter_.MayStart()) return {};
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
    starter_.Start(ticket, now);
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
  starter_.StartWaiting(now);
  return tickets;
}

void Leader::CancelRequest(Ticket ticket, absl::Status reason, absl::Time now) {
  const LiveRequest* request = live_.Find(ticket);
  if (request == nullptr) return;
  const auto run = live_.runs.find(request->run);
  live_.Answer(ticket, std::move(reason));
  if (run != live_.runs.end()) {
    ender_.Leave(run->first, now);
    ender_.ForgetStopped();
  }
  starter_.StartWaiting(now);
}

void Leader::SetPaused(Ticket ticket, bool paused, absl::Time now) {
  LiveRequest* request = live_.Find(ticket);
  if (request == nullptr || request->pauses.paused() == paused) return;
  request->pauses.Set(paused, now);
  starter_.StartWaiting(now);
}

// Not where all that lives is being stopped: the only request takes the room of that.
bool Leader::CrowdedOut(Ticket ticket) const {
  const bool alone = live_.requests.size() == 1 && !live_.AnyGoesOn();
  return Waits(ticket) && !live_.runs.empty() && !alone;
}

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
    live_.Answer(ticket,
                 absl::UnavailableError(absl::StrCat("the pool has no workers, and none joined within ",
                                                     absl::FormatDuration(options_.empty_timeout),
                                                     "; start some, or try again later")));
  }
  if (!overdue.empty()) starter_.StartWaiting(now);  // of those behind it, one may have workers that drain
}

// ---- Runs.

void Leader::Apply(RunId run, RunCoordinator::Outcome outcome, absl::Time now) {
  Take(run, std::move(outcome), now);
  ender_.ForgetStopped();
  starter_.StartWaiting(now);
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
  ender_.Complete(run, std::move(completed.result), now);
}

void Leader::Do(RunId run, RunCoordinator::RequestFailed& failed, absl::Time now) {
  // What fails beside others may go well by itself, on all ranks.
  if (live_.runs.at(run).pack.has_value()) {
    ender_.EndEpoch(run, std::string(failed.status.message()), /*lost_workers=*/false, now);
  } else {
    live_.Answer(live_.runs.at(run).ticket, failed.status);
    ender_.Cancel(live_.runs.at(run), now);
  }
  if (failed.unprepared == 0 || !members_.FailsToPrepare(failed.unprepared, /*prepared=*/false)) return;
  RunCoordinator::WorkersFailed failing = {
      .workers = {failed.unprepared},
      .why = absl::StrCat("it could prepare none of the last runs: ", failed.status.message()),
      .keep_out = true};
  Do(run, failing, now);
}

void Leader::Do(RunId run, RunCoordinator::RunFailed& failed, absl::Time now) {
  ender_.EndEpoch(run, failed.why, /*lost_workers=*/false, now);
}

void Leader::Do(RunId, RunCoordinator::WorkersFailed& failed, absl::Time now) {
  if (failed.keep_out) {
    for (Connection connection : failed.workers) members_.KeepOut(connection, now);
  }
  DropWorkers(failed.workers, failed.why, now);
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
