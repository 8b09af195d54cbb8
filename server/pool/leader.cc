#include "server/pool/leader.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"
#include "server/pool/offered_speed.h"
#include "server/pool/pool_planner.h"

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
      planner_(std::move(planner)),
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
      survey_(options.links) {}

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

Leader::LiveRun* Leader::RunOf(const v1::WorkerMessage& message) {
  RunId number = 0;
  if (message.has_prepared()) number = message.prepared().run();
  if (message.has_progress()) number = message.progress().run();
  if (message.has_rank_done()) number = message.rank_done().run();
  if (message.has_stopped()) number = message.stopped().run();
  if (message.has_paused()) number = message.paused().run();
  const auto run = runs_.find(number);
  if (run == runs_.end() || run->second.coordinator.epoch() != message.epoch()) return nullptr;
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
  for (const auto& [number, run] : runs_) runs.push_back(number);
  for (RunId number : runs) {
    const auto run = runs_.find(number);  // another's complaint may have ended it
    if (run != runs_.end()) Apply(number, run->second.coordinator.OnTick(now), now);
  }
  kv_.EndLapsed(now);
  ForgetStoppedRuns();  // who drains may have held what lapsed or was released
  if (now - last_heartbeat_ < options_.heartbeat_interval) return;
  last_heartbeat_ = now;
  for (const auto& [connection, worker] : members_.all()) {
    actions_.AddMessage(connection, epoch()).mutable_heartbeat();
  }
}

void Leader::DropWorkers(const std::set<Connection>& connections, const std::string& why, absl::Time now) {
  std::map<RunId, std::string> runs;  // runs that they took part in, and the names of those who did
  for (Connection connection : connections) {
    const std::string name = members_.Remove(connection, why);
    kv_.OnWorkerLost(connection, name, why);
    for (auto& [number, run] : runs_) {
      if (!run.coordinator.Has(connection)) continue;
      run.coordinator.OnWorkerLost(connection);
      std::string& names = runs[number];
      absl::StrAppend(&names, names.empty() ? "" : ", ", name);
    }
  }
  for (auto& [ticket, request] : requests_) {
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
    EndEpoch(number, absl::StrCat("worker ", names, " is lost: ", why), now);
  }
  ForgetStoppedRuns();
  StartWaiting(now);
}

// ---- Requests.

Leader::Ticket Leader::Submit(const Request& request, absl::Time now) {
  const Ticket ticket = ++last_ticket_;
  requests_.emplace(ticket, LiveRequest{.request = request, .waiting_since = now});
  StartWaiting(now);
  return ticket;
}

void Leader::CancelRequest(Ticket ticket, absl::Status reason, absl::Time now) {
  const LiveRequest* request = FindRequest(ticket);
  if (request == nullptr) return;
  const auto run = runs_.find(request->run);
  AnswerRequest(ticket, std::move(reason));
  if (run != runs_.end()) {
    CancelRun(run->second, now);
    ForgetStoppedRuns();
  }
  StartWaiting(now);
}

void Leader::CancelRun(LiveRun& run, absl::Time now) {
  run.coordinator.Cancel(now);
  kv_.OnRunFailed(run.coordinator.number(), "it was cancelled");
}

void Leader::SetPaused(Ticket ticket, bool paused, absl::Time now) {
  LiveRequest* request = FindRequest(ticket);
  if (request == nullptr || request->pauses.paused() == paused) return;
  request->pauses.Set(paused, now);
  request->waiting_since = now;
  StartWaiting(now);
}

bool Leader::CrowdedOut(Ticket ticket) const { return Waits(ticket) && !runs_.empty() && !AnyStops(); }

bool Leader::Undecided(Ticket ticket) const { return Waits(ticket) && AnyStops(); }

bool Leader::Waits(Ticket ticket) const {
  const auto request = requests_.find(ticket);
  return request != requests_.end() && request->second.run == 0;
}

Leader::RunId Leader::run_of(Ticket ticket) const {
  const auto request = requests_.find(ticket);
  return request != requests_.end() ? request->second.run : 0;
}

uint64_t Leader::PlaceOf(Ticket ticket) const {
  const auto run = runs_.find(run_of(ticket));
  return run != runs_.end() ? run->second.coordinator.a_worker() : 0;
}

Leader::LiveRequest* Leader::FindRequest(Ticket ticket) {
  const auto request = requests_.find(ticket);
  return request != requests_.end() ? &request->second : nullptr;
}

void Leader::AnswerRequest(Ticket ticket, absl::StatusOr<Result> result) {
  if (requests_.erase(ticket) > 0) actions_.Add(Answer{ticket, std::move(result)});
}

void Leader::RefuseOverdue(absl::Time now) {
  std::vector<Ticket> overdue;
  for (const auto& [ticket, request] : requests_) {
    const bool too_long = now - request.waiting_since >= options_.empty_timeout;
    if (request.run == 0 && !request.pauses.paused() && runs_.empty() && too_long) overdue.push_back(ticket);
  }
  for (Ticket ticket : overdue) {
    AnswerRequest(ticket,
                  absl::UnavailableError(absl::StrCat("the pool has no workers, and none joined within ",
                                                      absl::FormatDuration(options_.empty_timeout),
                                                      "; start some, or try again later")));
  }
}

// ---- Runs.

// The policy of what lives at once: the oldest requests whose turn it is, as many as the options and the
// workers' memory allow. A run that is being stopped counts.
void Leader::StartWaiting(absl::Time now) {
  while (auto* next = FirstWaiting()) {
    auto& [ticket, request] = *next;
    if (request.no_room || WorkersFor(request).empty()) break;  // OnTick ends the wait for a worker
    if (std::ssize(runs_) >= options_.runs_at_once) {
      request.no_room = true;
    } else {
      StartRun(ticket, now);
    }
  }
  PauseRuns(now);
}

bool Leader::HasPiecesOf(Connection worker) const {
  return std::any_of(requests_.begin(), requests_.end(), [worker](const auto& request) {
    return request.second.pieces.has_value() && request.second.pieces->Has(worker);
  });
}

HeldRuns::Workers Leader::WorkersFor(const LiveRequest& live) const {
  if (!live.pieces.has_value()) return members_.ByPlace();
  HeldRuns::Workers workers;
  for (const Connection connection : live.pieces->workers()) {
    workers.push_back(&members_.all().at(connection));
  }
  return workers;
}

bool Leader::AnyStops() const {
  return std::any_of(runs_.begin(), runs_.end(), [](const auto& run) {
    return run.second.coordinator.phase() == RunCoordinator::Phase::kStopping;
  });
}

std::pair<const Leader::Ticket, Leader::LiveRequest>* Leader::FirstWaiting() {
  const auto next = std::find_if(requests_.begin(), requests_.end(), [](const auto& request) {
    return request.second.run == 0 && !request.second.pauses.paused();
  });
  return next != requests_.end() ? &*next : nullptr;
}

bool Leader::HasTurn(const LiveRun& run) const {
  const auto request = requests_.find(run.ticket);
  return request != requests_.end() && !request->second.pauses.paused();
}

bool Leader::Blocked(const LiveRun& run) const {
  return !run.coordinator.messages_mix() &&
         std::any_of(runs_.begin(), runs_.end(), [&run](const auto& other) {
           return &other.second != &run && !other.second.coordinator.StandsStill() &&
                  other.second.coordinator.Shares(run.coordinator);
         });
}

// Who waits beside runs that stand still waits for their ends: they go on. Where messages do not mix, one
// after the other does, and none beside a run whose turn it is.
void Leader::PauseRuns(absl::Time now) {
  const bool all_go_on = FirstWaiting() != nullptr && !AnyStops();
  std::vector<LiveRun*> wait;
  for (auto& [number, run] : runs_) {
    if (!requests_.contains(run.ticket)) continue;
    RunCoordinator& coordinator = run.coordinator;
    const bool gives_way = std::any_of(runs_.begin(), runs_.end(), [&](const auto& other) {
      return HasTurn(other.second) && other.second.coordinator.Shares(coordinator);
    });
    const bool goes_on = HasTurn(run) || (all_go_on && (coordinator.messages_mix() || !gives_way));
    if (!goes_on || !coordinator.paused()) {
      coordinator.SetPaused(!goes_on, now);
    } else {
      wait.push_back(&run);
    }
  }
  for (LiveRun* run : wait) {
    if (!Blocked(*run)) run->coordinator.SetPaused(false, now);
  }
}

std::vector<Leader::Connection> Leader::Seated(const Plan& plan, const HeldRuns::Workers& workers) {
  std::vector<Connection> seated;
  for (const SeatsOfWorker& seats : SeatWorkers(workers, plan.ranks())) {
    seated.push_back(seats.worker->connection);
  }
  return seated;
}

int64_t Leader::TakenOn(const Membership::Worker& worker, const WeightShare& with) const {
  std::vector<WeightShare> shares = {with};
  int64_t taken = 0;
  for (const auto& [number, run] : runs_) {
    if (!run.coordinator.Has(worker.connection)) continue;
    taken += run.coordinator.reserved_bytes(worker.connection);
    const WeightShare share = run.coordinator.weight_share(worker.connection);
    if (std::find(shares.begin(), shares.end(), share) == shares.end()) shares.push_back(share);
  }
  if (taken == 0) return 0;
  const PlanWeights weights =
      FromProto(worker.offer.weights().sharded() ? worker.offer.weights() : worker.offer.shared_weights());
  for (const WeightShare& share : shares) taken += share.of > 0 ? ShareBytes(weights, share.of) : 0;
  return taken;
}

bool Leader::HasRoom(const Plan& plan, const HeldRuns::Workers& workers, bool shares_weights) const {
  const std::vector<SeatsOfWorker> seated = SeatWorkers(workers, plan.ranks());
  for (size_t i = 0; i < seated.size(); ++i) {
    const auto& [worker, first, count] = seated[i];
    WeightShare share;
    if (shares_weights) share = {.index = static_cast<int>(i), .of = static_cast<int>(seated.size())};
    const auto offered = static_cast<int64_t>(worker->offer.memory_bytes());
    const int64_t taken = TakenOn(*worker, share);
    if (offered > 0 && taken > 0 && ReservedBytes(plan, count) > offered - taken) return false;
  }
  return true;
}

// Begins a run for the request, or answers it.
void Leader::StartRun(Ticket ticket, absl::Time now) {
  LiveRequest& request = requests_.at(ticket);
  if (request.losses >= kMaxLosses) {
    return AnswerRequest(
        ticket, absl::UnavailableError(absl::StrCat("the pool lost workers in each of ", request.losses,
                                                    " attempts at this request; try again later")));
  }
  const RunId number = last_run_ + 1;
  absl::StatusOr<std::optional<PlannedRun>> planned = PlanRun(number, request);
  if (planned.ok() && !planned->has_value()) {
    request.no_room = true;
    return;
  }
  if (!planned.ok()) {
    const bool shrunk = request.attempts > 0 && absl::IsInvalidArgument(planned.status());
    return AnswerRequest(ticket, shrunk ? absl::UnavailableError(absl::StrCat(
                                              "the pool lost workers and now ", planned.status().message()))
                                        : planned.status());
  }
  if (members_.BeginRun()) survey_.AskAgain();
  if (std::exchange(request.new_attempt, false)) BeginAttempt(request, now);
  request.run = last_run_ = number;
  const int64_t tokens_ahead = request.pieces.has_value() ? request.pieces->tokens_ahead() : 0;
  PlannedRun& run = **planned;
  const RunCoordinator::Options options = {.layers = options_.kv.layers,
                                           .vocab = options_.vocab,
                                           .shares_weights = run.shares_weights,
                                           .tokens_ahead = tokens_ahead,
                                           .hang_timeout = options_.hang_timeout,
                                           .prepare_timeout = options_.prepare_timeout,
                                           .stop_timeout = options_.stop_timeout};
  const auto first = static_cast<size_t>(run.plan.cached_tokens);
  const auto tokens = request.request.tokens.subspan(first, static_cast<size_t>(run.plan.layout.tokens()));
  runs_.emplace(number,
                LiveRun{ticket, RunCoordinator(number, epoch(), std::move(run.plan), tokens, run.workers,
                                               run.kv, options, actions_, survey_, now)});
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

absl::StatusOr<std::optional<Leader::PlannedRun>> Leader::PlanRun(RunId run, LiveRequest& live) {
  if (live.pieces.has_value()) return PlanNextPiece(run, live);
  KvSlabs prefix = kv_.FindPrefix(live.request.options);
  if (live.request.options.submeshes > 1) {
    if (std::optional<PlannedRun> planned = PlanOnSubmesh(run, live, prefix)) return planned;
    prefix = kv_.FindPrefix(live.request.options);
  }
  absl::StatusOr<std::optional<PlannedRun>> planned = PlanBehind(run, live, prefix);
  const bool was_behind = prefix.tokens() > 0;
  prefix = {};  // let go: others may need its room
  if (absl::IsResourceExhausted(planned.status()) && was_behind) return PlanBehind(run, live, prefix);
  return planned;
}

bool Leader::SharesAllWeights() const {
  return std::any_of(members_.all().begin(), members_.all().end(),
                     [](const auto& entry) { return entry.second.offer.weights().sharded(); });
}

// Workers that share weights on their own account would keep other shares for each set of them.
PoolCapacity Leader::CapacityOn(const HeldRuns::Workers& workers) const {
  PoolCapacity capacity = CapacityOf(workers, survey_.links());
  if (std::ssize(workers) < workers_to_stay()) capacity.shared_weights.reset();
  return capacity;
}

std::optional<PoolCapacity> Leader::SubmeshCapacity(int submeshes) const {
  if (submeshes > workers_to_stay() || SharesAllWeights()) return std::nullopt;
  return CapacityOn(DivideWorkers(members_.ByPlace(), submeshes).front());
}

absl::StatusOr<PlanChoice> Leader::PlanOn(const HeldRuns::Workers& workers, const LiveRequest& live,
                                          const KvSlabs& prefix) const {
  const Request& request = live.request;
  return planner_(CapacityOn(workers), std::ssize(request.tokens), request.options,
                  KvDirectory::Describe(prefix));
}

std::vector<HeldRuns::Workers> Leader::SubmeshesFor(const LiveRequest& live, const KvSlabs& prefix) const {
  if (live.request.options.submeshes == 1 || SharesAllWeights()) return {};
  std::vector<HeldRuns::Workers> meshes = DivideWorkers(members_.ByPlace(), live.request.options.submeshes);
  // Runs on it that compute, whether it lacks the prefix, and all runs on it.
  using Place = std::tuple<int, bool, int>;
  std::vector<std::pair<Place, HeldRuns::Workers>> places;
  for (HeldRuns::Workers& mesh : meshes) {
    auto& [computing, lacks_prefix, all] = places.emplace_back(Place(), mesh).first;
    lacks_prefix = !kv_.CanFollow(prefix, mesh);
    for (const auto& [number, run] : runs_) {
      if (std::none_of(mesh.begin(), mesh.end(), [&, &of = run.coordinator](const Membership::Worker* each) {
            return of.Has(each->connection);
          })) {
        continue;
      }
      const auto request = requests_.find(run.ticket);
      computing += request != requests_.end() && !request->second.pauses.paused() ? 1 : 0;
      ++all;
    }
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const auto& left, const auto& right) { return left.first < right.first; });
  std::transform(places.begin(), places.end(), meshes.begin(),
                 [](auto& place) { return std::move(place.second); });
  return meshes;
}

std::optional<Leader::PlannedRun> Leader::PlanOnSubmesh(RunId run, LiveRequest& live, KvSlabs& prefix) {
  for (HeldRuns::Workers& mesh : SubmeshesFor(live, prefix)) {
    absl::StatusOr<PlanChoice> choice = PlanOn(mesh, live, kv_.CanFollow(prefix, mesh) ? prefix : KvSlabs());
    if (!choice.ok() || !choice->pieces.empty()) continue;
    auto planned = BeginPlanned(run, live, *std::move(choice), prefix, std::move(mesh));
    if (planned.ok() && planned->has_value()) return *std::move(planned);
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<Leader::PlannedRun>> Leader::PlanBehind(RunId run, LiveRequest& live,
                                                                     KvSlabs& prefix) {
  HeldRuns::Workers workers = members_.ByPlace();
  const bool follows = kv_.CanFollow(prefix, workers);
  absl::StatusOr<PlanChoice> choice = PlanOn(workers, live, follows ? prefix : KvSlabs());
  if (prefix.tokens() > 0 && !follows && !SharesAllWeights()) {
    HeldRuns::Workers holders = kv_.HoldersOf(prefix, workers);
    if (absl::StatusOr<PlanChoice> there = PlanOn(holders, live, prefix); IsFaster(there, choice)) {
      choice = std::move(there);
      workers = std::move(holders);
    }
  }
  RETURN_IF_ERROR(choice.status());
  return BeginPlanned(run, live, *std::move(choice), prefix, std::move(workers));
}

absl::StatusOr<std::optional<Leader::PlannedRun>> Leader::BeginPlanned(RunId run, LiveRequest& live,
                                                                       PlanChoice choice, KvSlabs& prefix,
                                                                       HeldRuns::Workers workers) {
  const bool shares_weights = choice.weights.mode == WeightMode::kSharded;
  std::optional<PromptPieces> pieces;
  if (!choice.pieces.empty()) {
    std::vector<Connection> seated = Seated(choice.plan, workers);
    pieces.emplace(std::move(choice), std::move(seated));
  }
  Plan plan = pieces.has_value() ? pieces->plan() : std::move(choice.plan);
  if (plan.cached_tokens == 0) prefix = {};
  if (!HasRoom(plan, workers, shares_weights)) return std::nullopt;
  const KvDirectory::Piece piece = {.first = true,
                                    .tokens_ahead = pieces.has_value() ? pieces->tokens_ahead() : 0};
  ASSIGN_OR_RETURN(KvDirectory::RunKv kv,
                   kv_.BeginRun(run, live.request.options, prefix, piece, plan, workers));
  live.pieces = std::move(pieces);
  if (live.pieces.has_value()) live.pieces->HoldAhead(std::move(kv.ahead));
  return PlannedRun{.workers = std::move(workers),
                    .plan = std::move(plan),
                    .shares_weights = shares_weights,
                    .kv = std::move(kv)};
}

absl::StatusOr<std::optional<Leader::PlannedRun>> Leader::PlanNextPiece(RunId run, LiveRequest& live) {
  PromptPieces& pieces = *live.pieces;
  const HeldRuns::Workers workers = WorkersFor(live);
  Plan plan = pieces.plan();
  if (!HasRoom(plan, workers, pieces.shares_weights())) return std::nullopt;
  pieces.HoldAhead(nullptr);
  const KvDirectory::Piece piece = {.first = false, .tokens_ahead = pieces.tokens_ahead()};
  ASSIGN_OR_RETURN(KvDirectory::RunKv kv,
                   kv_.BeginRun(run, live.request.options, pieces.before(), piece, plan, workers));
  pieces.HoldAhead(std::move(kv.ahead));
  return PlannedRun{.workers = workers,
                    .plan = std::move(plan),
                    .shares_weights = pieces.shares_weights(),
                    .kv = std::move(kv)};
}

void Leader::KeepPieces(LiveRequest& live) {
  if (!live.pieces.has_value()) return;
  PromptPieces& pieces = *live.pieces;
  if (pieces.first()) return live.pieces.reset();  // to be planned anew
  const Plan plan = pieces.plan();
  pieces.HoldAhead(nullptr);
  pieces.HoldAhead(kv_.HoldAhead(plan, plan.layout.tokens() + pieces.tokens_ahead(), WorkersFor(live)));
}

void Leader::Apply(RunId run, RunCoordinator::Outcome outcome, absl::Time now) {
  const auto live = runs_.find(run);
  if (live != runs_.end() && live->second.coordinator.phase() == RunCoordinator::Phase::kRunning) {
    kv_.OnRunning(run);
  }
  std::visit([&](auto& what) { Do(run, what, now); }, outcome);
  ForgetStoppedRuns();
  StartWaiting(now);
}

void Leader::Do(RunId run, RunCoordinator::LayersDone& done, absl::Time) {
  const Ticket ticket = runs_.at(run).ticket;
  const LiveRequest* request = FindRequest(ticket);
  const PromptPieces* pieces =
      request != nullptr && request->pieces.has_value() ? &*request->pieces : nullptr;
  const int before = pieces != nullptr ? pieces->done() : 0, count = pieces != nullptr ? pieces->count() : 1;
  const int layers = options_.kv.layers;
  actions_.Add(LayersDone{ticket, before * layers + done.layers, count * layers});
  kv_.OnLayersDone(run, done.layers);
}

void Leader::Do(RunId run, RunCoordinator::Completed& completed, absl::Time now) {
  // The last layer's end comes with the ranks' answers, often before any word of progress.
  RunCoordinator::LayersDone all{options_.kv.layers};
  if (completed.result.ok() && runs_.at(run).coordinator.layers_done() < all.layers) Do(run, all, now);
  const Ticket ticket = runs_.at(run).ticket;
  KvSlabs kept = kv_.OnRunOver(run, members_.ByPlace());
  Forget(run);
  if (LiveRequest* request = FindRequest(ticket); request != nullptr && completed.result.ok()) {
    if (request->pieces.has_value()) {
      PromptPieces& pieces = *request->pieces;
      if (!pieces.last()) {
        pieces.OnDone(*std::move(completed.result), std::move(kept));
        request->run = 0;
        request->waiting_since = now;
        return;
      }
      completed.result = pieces.Finish(*std::move(completed.result));
    }
    completed.result->attempts = request->attempts;
    completed.result->lost_seconds = request->lost_seconds;
    completed.result->paused_seconds = absl::ToDoubleSeconds(request->pauses.Total(now));
  }
  AnswerRequest(ticket, std::move(completed.result));
}

void Leader::Do(RunId run, RunCoordinator::RequestFailed& failed, absl::Time now) {
  AnswerRequest(runs_.at(run).ticket, failed.status);
  CancelRun(runs_.at(run), now);
}

void Leader::Do(RunId run, RunCoordinator::RunFailed& failed, absl::Time now) {
  EndEpoch(run, failed.why, now);
}

void Leader::Do(RunId, RunCoordinator::WorkersFailed& failed, absl::Time now) {
  if (failed.keep_out) {
    for (Connection connection : failed.workers) members_.KeepOut(connection, now);
  }
  DropWorkers(failed.workers, failed.why, now);
}

void Leader::EndEpoch(RunId number, const std::string& why, absl::Time now) {
  auto& [ticket, run] = runs_.at(number);
  if (run.phase() == RunCoordinator::Phase::kStopping) return;
  LiveRequest* request = FindRequest(ticket);
  const std::string poisonous = request == nullptr ? "" : Blame(*request, number, why, now);
  members_.EndEpoch();
  actions_.Log(absl::StrCat("epoch ", run.epoch(), " ended in run ", number, ": ", LogQuote(why)),
               LogLevel::kWarning);
  run.Abort(why, now);
  kv_.OnRunFailed(number, why);
  if (request != nullptr) {
    request->waiting_since = now;
    request->new_attempt = true;
    if (run.MayHaveComputed(now - options_.silence_timeout)) ++request->losses;
    KeepPieces(*request);
  }
  if (!poisonous.empty()) AnswerRequest(ticket, absl::InternalError(poisonous));
}

std::string Leader::Blame(LiveRequest& request, RunId number, const std::string& why, absl::Time now) {
  const absl::Time since = now - options_.silence_timeout;
  const RunCoordinator& run = runs_.at(number).coordinator;
  if (run.phase() != RunCoordinator::Phase::kRunning || !run.MayHaveComputed(since)) return "";
  const bool alone = std::none_of(runs_.begin(), runs_.end(), [&](const auto& other) {
    return other.first != number && other.second.coordinator.Shares(run) &&
           other.second.coordinator.MayHaveComputed(since);
  });
  const PromptPlace place = run.PlaceOfEnd(now, options_.silence_timeout);
  if (!alone) {
    request.ended.Suspect(place);
    return "";
  }
  if (!request.ended.Blame(place)) return "";
  for (auto& [ticket, other] : requests_) other.ended.ForgetSuspicions();
  return absl::StrCat("request ", request.request.id,
                      " ended 2 epochs of the pool at the same place of its prompt and is refused as "
                      "poisonous; the last one: ",
                      why);
}

void Leader::Forget(RunId run) {
  runs_.erase(run);
  LookForRoomAgain();
}

void Leader::LookForRoomAgain() {
  for (auto& [ticket, request] : requests_) request.no_room = false;
}

// Their requests wait again, and who drained for them may go.
void Leader::ForgetStoppedRuns() {
  for (auto next = runs_.begin(); next != runs_.end();) {
    const auto run = next++;
    if (!run->second.coordinator.stopped()) continue;
    if (LiveRequest* request = FindRequest(run->second.ticket)) request->run = 0;
    Forget(run->first);
  }
  members_.ReleaseDrained([this](Connection connection) {
    return kv_.Holds(connection) || HasPiecesOf(connection) ||
           std::any_of(runs_.begin(), runs_.end(),
                       [&](const auto& run) { return run.second.coordinator.Has(connection); });
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
    const auto run = std::find_if(runs_.begin(), runs_.end(), [&](const auto& each) {
      return each.second.coordinator.Has(worker->connection);
    });
    if (run != runs_.end()) {
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
