#include "server/pool/pool_engine.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/plan/pass_parts.h"
#include "engine/prefill_request.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/config/config.h"
#include "server/config/config_units.h"
#include "server/observe/build_name.h"
#include "server/observe/log.h"
#include "server/observe/pool_log.h"
#include "server/pool/pool_planner.h"
#include "server/pool/pool_run.h"

namespace meshfill {
namespace {

Leader::Options LeaderOptions(const v1::Config& config, const IdentifiedModel& model) {
  const v1::PoolSection& pool = config.pool();
  Leader::Options options;
  options.build = kBuildName;
  options.model = model.id;
  options.encrypt = pool.encrypt();
  options.kv = KvShapeOf(model.shape);
  options.kv_cache = ToEngineOptions(config).kv_cache;
  options.vocab = model.shape.vocab;
  options.links = ConfiguredLinksOf(pool);
  options.runs_at_once = kLiveRuns;
  // Epochs of a leader that was started again are later than those before: the time of day says so, and
  // nothing else here asks for it. No pool has a new epoch every millisecond.
  options.first_epoch = static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()));
  options.silence_timeout = ToDuration(pool.silence_timeout());
  options.hang_timeout = ToDuration(pool.hang_timeout());
  options.empty_timeout = ToDuration(pool.empty_timeout());
  return options;
}

}  // namespace

PoolEngine::PoolEngine(const v1::Config& config, IdentifiedModel model,
                       std::unique_ptr<HolderChannels> holders, Metrics& metrics)
    : model_(std::move(model)),
      defaults_(ToEngineOptions(config)),
      metrics_(metrics),
      leader_(LeaderOptions(config, model_),
              [this](const PoolCapacity& capacity, int64_t tokens, const PrefillOptions& options,
                     const CachedPrefix& cached) { return PlanFor(capacity, tokens, options, cached); }),
      kv_leases_(KvShapeOf(model_.shape), std::move(holders),
                 [this](const std::function<void(Leader&, absl::Time)>& use) {
                   const MutexLock lock(mu_);
                   use(leader_, MonotonicNow());
                   DoActions();
                 }) {}

absl::StatusOr<std::unique_ptr<PoolEngine>> PoolEngine::Listen(const v1::Config& config, Metrics& metrics) {
  ASSIGN_OR_RETURN(auto model, IdentifyModel(config.model().path(), ToEngineOptions(config).dtype));
  ASSIGN_OR_RETURN(auto holders, HolderChannels::Make(config.api()));
  std::unique_ptr<PoolEngine> engine(new PoolEngine(config, std::move(model), std::move(holders), metrics));
  ASSIGN_OR_RETURN(auto control, ControlService::Start(config.pool(), *engine));
  {
    const MutexLock lock(engine->mu_);
    engine->control_ = std::move(control);
    engine->DoActions();  // workers may have joined before control_ was set
  }
  engine->clock_ = std::thread([engine = engine.get()] { engine->Tick(); });
  return engine;
}

PoolEngine::~PoolEngine() {
  {
    const MutexLock lock(mu_);
    quit_ = true;
    changed_.NotifyAll();
  }
  if (clock_.joinable()) clock_.join();
  std::unique_ptr<ControlService> control;  // its end calls back in: without the mutex
  const MutexLock lock(mu_);
  control.swap(control_);
}

int PoolEngine::ranks() const {
  const MutexLock lock(mu_);
  return leader_.capacity().ranks;
}

double PoolEngine::peak_flops() const {
  const MutexLock lock(mu_);
  return leader_.peak_flops();
}

std::vector<PoolMember> PoolEngine::members() const {
  const MutexLock lock(mu_);
  std::vector<PoolMember> members;
  for (const Leader::WorkerView& worker : leader_.workers()) {
    members.push_back({.name = worker.offer->name(),
                       .host = worker.offer->host(),
                       .backend = worker.offer->backend(),
                       .state = WorkerStateName(worker.state),
                       .ranks = static_cast<int>(worker.offer->ranks()),
                       .first_rank = worker.first_rank});
  }
  return members;
}

std::vector<PoolLink> PoolEngine::links() const {
  const MutexLock lock(mu_);
  return leader_.links();
}

absl::StatusOr<PlanChoice> PoolEngine::MakePlan(int64_t tokens, const PrefillOptions& options) const {
  RETURN_IF_ERROR(CheckPromptOptions(model_.shape, model_name(), tokens, options));
  std::vector<PlanSite> sites;
  {
    const MutexLock lock(mu_);
    sites = leader_.SitesFor(options);
  }
  absl::StatusOr<PlanChoice> best = absl::InternalError("no plan");
  for (const PlanSite& site : sites) {
    absl::StatusOr<PlanChoice> choice = PlanFor(site.capacity, tokens, options, site.cached);
    if (&site == &sites.front() || IsFaster(choice, best)) best = std::move(choice);
  }
  return best;
}

std::vector<SubmeshSeconds> PoolEngine::Submeshes(int64_t tokens, const PrefillOptions& options) const {
  int most = 1;
  {
    const MutexLock lock(mu_);
    if (!leader_.SubmeshCapacity(2).has_value()) return {};
    most = std::min(leader_.workers_to_stay(), kMostSubmeshes);
  }
  return SubmeshesUpTo(most, options,
                       [&](const PrefillOptions& on_submesh) { return MakePlan(tokens, on_submesh); });
}

int64_t PoolEngine::CachedTokens(int64_t tokens, const PrefillOptions& options) const {
  const MutexLock lock(mu_);
  return UsableTokensOf(KvDirectory::Describe(leader_.kv().LookUpPrefix(options)), defaults_, tokens,
                        options);
}

absl::StatusOr<PlanChoice> PoolEngine::PlanFor(const PoolCapacity& capacity, int64_t tokens,
                                               const PrefillOptions& options,
                                               const CachedPrefix& cached) const {
  return PlanOnFastest(capacity, options, [&](const PoolCapacity& part) {
    return correction_.Plan(part.speed, part.topology, [&](const PoolSpeed& speed, const Topology& topology) {
      PoolCapacity corrected = part;
      corrected.speed = speed;
      corrected.topology = topology;
      return PlanForPool(model_.shape, defaults_, corrected, tokens, options, cached);
    });
  });
}

absl::StatusOr<std::unique_ptr<Prefill>> PoolEngine::Start(const PrefillRequest& request,
                                                           PrefillObserver* observer) {
  RETURN_IF_ERROR(Check(request));
  auto run = std::make_unique<Run>(*this, request, observer);
  const MutexLock lock(mu_);
  RETURN_IF_ERROR(CheckRoom());
  RETURN_IF_ERROR(run->Submit());
  return run;
}

absl::Status PoolEngine::Check(const PrefillRequest& request) const {
  if (request.options.kv != nullptr && request.options.kv_lease.empty()) {
    return absl::InvalidArgumentError("a pool of workers keeps K and V under a lease alone; give one");
  }
  RETURN_IF_ERROR(
      CheckPromptOptions(model_.shape, model_name(), std::ssize(request.tokens), request.options));
  return CheckTokenIds(model_.shape, model_name(), request.tokens);
}

absl::Status PoolEngine::CheckRoom() const {
  std::set<uint64_t> packs;
  const auto live = std::count_if(runs_.begin(), runs_.end(), [&](const auto& entry) {
    return entry.second->pack() == 0 || packs.insert(entry.second->pack()).second;
  });
  if (live < capacity()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the pool runs ", capacity(), " prefills at a time; wait for the end of one"));
}

void PoolEngine::Learn(const Prediction& predicted, const MeasuredSeconds& measured) {
  correction_.Observe(predicted, measured);
  const bool wrong = correction_.StaysWrong();
  if (std::exchange(speeds_forgotten_, wrong) || !wrong) return;
  LogPoolNote(
      absl::StrCat(correction_.WhatIsWrong(), "; workers that keep theirs measure it at their next start"),
      /*warning=*/true);
  leader_.ForgetSpeeds();
  DoActions();
}

// ---- Packs.

PackRoom PoolEngine::pack_room() const {
  const MutexLock lock(mu_);
  PackRoom room = pack_room_;
  if (room.ranks > 0) room.rank_bytes = std::min(room.rank_bytes, leader_.MostRankBytes());
  return room;
}

PackShare PoolEngine::ShareOfPack(int64_t tokens, const PrefillOptions& options) const {
  const MutexLock lock(mu_);
  // Behind what is cached of it a prompt runs by itself, on the ranks that have that.
  if (UsableTokensOf(KvDirectory::Describe(leader_.kv().LookUpPrefix(options)), defaults_, tokens, options) >
      0)
    return {};
  const std::optional<PoolCapacity> rank = leader_.RankCapacity();
  const std::optional<PlanChoice> on_rank = PlanOnRank(rank, tokens, options);
  return on_rank.has_value() ? ShareOf(*on_rank, *rank) : PackShare();
}

PackShare PoolEngine::ShareOf(const PlanChoice& on_rank, const PoolCapacity& rank) const {
  return PackShareOf(model_.shape, rank.speed, correction_.factors(), on_rank.plan, /*pass_bytes=*/0);
}

std::optional<PlanChoice> PoolEngine::PlanOnRank(const std::optional<PoolCapacity>& rank, int64_t tokens,
                                                 const PrefillOptions& options) const {
  if (pack_room_.ranks == 0 || !rank.has_value() || tokens > pack_room_.rank_tokens) return {};
  if (ChoosesMesh(options) || !CheckPromptOptions(model_.shape, model_name(), tokens, options).ok())
    return {};
  absl::StatusOr<PlanChoice> choice = PlanFor(*rank, tokens, options, CachedPrefix());
  if (!choice.ok() || !choice->pieces.empty()) return {};
  return *std::move(choice);
}

PackRoom PoolEngine::MeasurePackRoom() const {
  const std::optional<PoolCapacity> rank = leader_.RankCapacity();
  if (!rank.has_value()) return {};
  const int64_t tokens = LargestPackTokens(
      std::min(rank->speed.slice_tokens, model_.shape.context_tokens), [&](int64_t so_many) {
        const absl::StatusOr<PlanChoice> choice = PlanFor(*rank, so_many, PrefillOptions(), CachedPrefix());
        return choice.ok() && choice->pieces.empty();
      });
  if (tokens == 0) return {};
  PackRoom room = {.ranks = leader_.capacity().ranks, .rank_tokens = tokens};
  if (rank->rank_memory_bytes > 0) room.rank_bytes = rank->rank_memory_bytes;
  return room;
}

absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> PoolEngine::StartPack(
    std::span<const PrefillRequest> requests, std::span<PrefillObserver* const> observers) {
  for (const PrefillRequest& request : requests) RETURN_IF_ERROR(Check(request));
  std::vector<std::unique_ptr<Run>> runs;  // they take the mutex where they go
  const MutexLock lock(mu_);
  const absl::Time since = MonotonicNow();
  while (leader_.MayGetRoom(since, MonotonicNow())) changed_.WaitFor(mu_, kTick);
  RETURN_IF_ERROR(CheckRoom());
  const std::optional<PoolCapacity> rank = leader_.RankCapacity();
  Pack pack(pack_room_);
  std::vector<Leader::PackedRequest> packed;
  std::map<int, double> tokens_of_rank;
  std::vector<std::vector<PartSeconds>> parts_of_rank(static_cast<size_t>(pack_room_.ranks));
  for (size_t i = 0; i < requests.size(); ++i) {
    const int64_t tokens = std::ssize(requests[i].tokens);
    const std::optional<PlanChoice> on_rank = PlanOnRank(rank, tokens, requests[i].options);
    const std::optional<int> of = on_rank.has_value() ? pack.Add(ShareOf(*on_rank, *rank)) : std::nullopt;
    if (!of.has_value())
      return absl::FailedPreconditionError("the prompt is too long by now to share a pass");
    runs.push_back(std::make_unique<Run>(*this, requests[i], observers[i]));
    packed.push_back({.request = runs.back()->ForLeader(), .rank = *of});
    tokens_of_rank[*of] += static_cast<double>(tokens);
    parts_of_rank[static_cast<size_t>(*of)].push_back(on_rank->plan.predicted.parts);
  }
  for (Leader::PackedRequest& each : packed) {
    each.share = static_cast<double>(each.request.tokens.size()) / tokens_of_rank.at(each.rank);
  }
  const bool alone = leader_.empty();
  const std::vector<Leader::Ticket> tickets = leader_.SubmitPack(packed, pack.seconds(), MonotonicNow());
  ++last_pack_;
  std::vector<PartSeconds> passes;  // by rank
  for (const auto& parts : parts_of_rank) passes.push_back(PassParts(model_.shape, rank->speed, parts));
  const PoolCapacity all = leader_.capacity();
  // Of ranks that differ, the speed that all are predicted with is not that of each.
  const bool tells = all.faster_parts.empty() && TellsOfSpeed(passes, all.ranks_share_cores);
  std::set<int> told;  // the first prompt of each rank tells of it
  for (size_t i = 0; i < tickets.size(); ++i) {
    runs[i]->Attach(tickets[i], last_pack_);
    const int of = packed[i].rank;
    if (tells && told.insert(of).second) runs[i]->TellOfPass(passes[static_cast<size_t>(of)]);
  }
  DoActions();
  if (tickets.empty() && alone) return absl::FailedPreconditionError("the pass does not fit the workers");
  if (tickets.empty()) return absl::ResourceExhaustedError("the workers have no room for the pass by now");
  std::vector<std::unique_ptr<Prefill>> prefills(std::make_move_iterator(runs.begin()),
                                                 std::make_move_iterator(runs.end()));
  return prefills;
}

void PoolEngine::OnConnected(ControlService::Connection connection) {
  const MutexLock lock(mu_);
  leader_.OnConnected(connection, MonotonicNow());
  DoActions();
}

void PoolEngine::OnMessage(ControlService::Connection connection, const v1::WorkerMessage& message) {
  const MutexLock lock(mu_);
  leader_.OnMessage(connection, message, MonotonicNow());
  DoActions();
}

void PoolEngine::OnDisconnected(ControlService::Connection connection) {
  const MutexLock lock(mu_);
  leader_.OnDisconnected(connection, MonotonicNow());
  DoActions();
}

void PoolEngine::Tick() {
  absl::Time publish = absl::InfinitePast();
  MutexLock lock(mu_);
  absl::Time last = MonotonicNow();
  while (!quit_) {
    const absl::Time now = MonotonicNow();
    if (now - last >= kStoodStill) leader_.OnStoodStill(now - last, now);
    last = now;
    leader_.OnTick(now);
    DoActions();
    if (now >= publish) {  // each event wakes this thread
      PublishKv();
      publish = now + kTick;
    }
    changed_.WaitFor(mu_, kTick);
  }
}

void PoolEngine::Do(Leader::Send& send) { control_->Send(send.to, std::move(send.message)); }
void PoolEngine::Do(Leader::Close& close) { control_->Close(close.connection); }
void PoolEngine::Do(Leader::LogLine& line) { Log(line.text, {.level = line.level}); }

void PoolEngine::Do(Leader::Answer& answer) {
  const auto run = runs_.find(answer.ticket);
  if (run != runs_.end()) run->second->OnAnswer(std::move(answer.result));
}

void PoolEngine::Do(Leader::LayersDone& done) {
  const auto run = runs_.find(done.ticket);
  if (run != runs_.end()) run->second->OnLayersDone(done);
}

void PoolEngine::DoActions() {
  if (control_ == nullptr) return;  // they wait until it is there
  if (const uint64_t version = leader_.kv().version(); std::exchange(kv_version_, version) != version) {
    kv_leases_.OnChanged();
  }
  const std::pair members(leader_.counters().joins, leader_.workers_to_stay());
  if (std::exchange(rooms_of_, members) != members) {
    leader_.LeaveToShort(ShortRoomOf(model_.shape, defaults_, OneRankOf(leader_.capacity())));
    pack_room_ = MeasurePackRoom();
  }
  std::vector<Leader::Action> actions = leader_.TakeActions();
  if (actions.empty()) return;
  for (Leader::Action& action : actions) {
    std::visit([this](auto& each) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { Do(each); }, action);
  }
  PublishMetrics();
  changed_.NotifyAll();
}

void PoolEngine::PublishKv() {
  const uint64_t version = leader_.kv().version();
  if (std::exchange(published_kv_version_, version) == version) return;
  std::map<std::string, KvLoad> load;
  for (const auto& [name, kv] : leader_.kv_by_worker()) {
    load[name] = {.leases = kv.leases, .bytes = kv.bytes, .max_bytes = kv.max_bytes};
  }
  metrics_.SetKvOfWorkers(load);
}

void PoolEngine::PublishMetrics() {
  std::map<std::string, int> ranks;
  for (const Leader::WorkerView& worker : leader_.workers()) {
    ranks[WorkerStateName(worker.state)] += static_cast<int>(worker.offer->ranks());
  }
  const Leader::Counters counters = leader_.counters();
  metrics_.SetWorkers({.ranks_by_state = std::move(ranks),
                       .epochs = counters.epochs,
                       .joins = counters.joins,
                       .losses = counters.losses,
                       .refusals = counters.refusals,
                       .retries = counters.retries});
  metrics_.SetPeakFlops(leader_.peak_flops());
}

}  // namespace meshfill
