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
#include "engine/prefill_request.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/config/config.h"
#include "server/config/config_units.h"
#include "server/observe/build_name.h"
#include "server/observe/log.h"
#include "server/pool/pool_planner.h"
#include "server/pool/pool_run.h"

namespace meshfill {
namespace {

constexpr absl::Duration kRoomTimeout = absl::Seconds(3);  // longest wait of a pack for runs that are stopped

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
  PoolCapacity capacity;
  CachedPrefix cached;
  {
    const MutexLock lock(mu_);
    capacity = leader_.capacity();
    cached = leader_.kv().LookUpPrefix(options);
    const std::optional<PoolCapacity> submesh =
        options.submeshes > 1 ? leader_.SubmeshCapacity(options.submeshes) : std::nullopt;
    if (submesh.has_value()) capacity = *submesh;
    // On another sub-mesh than that which has it, it is of no use.
    if (submesh.has_value() && cached.ranks != capacity.ranks) cached = {};
  }
  RETURN_IF_ERROR(CheckPromptOptions(model_.shape, model_name(), tokens, options));
  return PlanFor(capacity, tokens, options, cached);
}

std::vector<SubmeshSeconds> PoolEngine::Submeshes(int64_t tokens, const PrefillOptions& options) const {
  int most = 1;
  {
    const MutexLock lock(mu_);
    if (!leader_.SubmeshCapacity(2).has_value()) return {};
    most = std::min(leader_.workers_to_stay(), capacity());
  }
  return SubmeshesUpTo(most, options,
                       [&](const PrefillOptions& on_submesh) { return MakePlan(tokens, on_submesh); });
}

int64_t PoolEngine::CachedTokens(int64_t tokens, const PrefillOptions& options) const {
  const MutexLock lock(mu_);
  return UsableTokensOf(leader_.kv().LookUpPrefix(options), defaults_, tokens, options);
}

absl::StatusOr<PlanChoice> PoolEngine::PlanFor(const PoolCapacity& capacity, int64_t tokens,
                                               const PrefillOptions& options,
                                               const CachedPrefix& cached) const {
  return correction_.Plan(capacity.speed, capacity.topology,
                          [&](const PoolSpeed& speed, const Topology& topology) {
                            PoolCapacity corrected = capacity;
                            corrected.speed = speed;
                            corrected.topology = topology;
                            return PlanForPool(model_.shape, defaults_, corrected, tokens, options, cached);
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

// ---- Packs.

PackRoom PoolEngine::pack_room() const {
  const MutexLock lock(mu_);
  return pack_room_;
}

PackShare PoolEngine::ShareOfPack(int64_t tokens, const PrefillOptions& options) const {
  const MutexLock lock(mu_);
  // Behind what is cached of it a prompt runs by itself, on the ranks that have that.
  if (UsableTokensOf(leader_.kv().LookUpPrefix(options), defaults_, tokens, options) > 0) return {};
  return ShareOnRank(leader_.RankCapacity(), tokens, options);
}

PackShare PoolEngine::ShareOnRank(const std::optional<PoolCapacity>& rank, int64_t tokens,
                                  const PrefillOptions& options) const {
  if (pack_room_.ranks == 0 || !rank.has_value() || tokens > pack_room_.rank_tokens) return {};
  if (ChoosesMesh(options) || !CheckPromptOptions(model_.shape, model_name(), tokens, options).ok())
    return {};
  const absl::StatusOr<PlanChoice> choice = PlanFor(*rank, tokens, options, CachedPrefix());
  if (!choice.ok() || !choice->pieces.empty()) return {};
  return PackShareOf(model_.shape, rank->speed, correction_.factors(), choice->plan, /*pass_bytes=*/0);
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
  // What others that are cancelled meanwhile take is not waited for.
  const absl::Time deadline = MonotonicNow() + kRoomTimeout;
  while (leader_.MakesRoom() && MonotonicNow() < deadline) changed_.WaitFor(mu_, kTick);
  RETURN_IF_ERROR(CheckRoom());
  const std::optional<PoolCapacity> rank = leader_.RankCapacity();
  Pack pack(pack_room_);
  std::vector<Leader::PackedRequest> packed;
  std::map<int, double> tokens_of_rank;
  for (size_t i = 0; i < requests.size(); ++i) {
    const int64_t tokens = std::ssize(requests[i].tokens);
    const std::optional<int> of = pack.Add(ShareOnRank(rank, tokens, requests[i].options));
    if (!of.has_value())
      return absl::FailedPreconditionError("the prompt is too long by now to share a pass");
    runs.push_back(std::make_unique<Run>(*this, requests[i], observers[i]));
    packed.push_back({.request = runs.back()->ForLeader(), .rank = *of});
    tokens_of_rank[*of] += static_cast<double>(tokens);
  }
  for (Leader::PackedRequest& each : packed) {
    each.share = static_cast<double>(each.request.tokens.size()) / tokens_of_rank.at(each.rank);
  }
  const bool alone = leader_.empty();
  const std::vector<Leader::Ticket> tickets = leader_.SubmitPack(packed, pack.seconds(), MonotonicNow());
  ++last_pack_;
  for (size_t i = 0; i < tickets.size(); ++i) runs[i]->Attach(tickets[i], last_pack_);
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
  MutexLock lock(mu_);
  while (!quit_) {
    leader_.OnTick(MonotonicNow());
    DoActions();
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
    PublishKv();
  }
  const std::pair members(leader_.counters().joins, leader_.workers_to_stay());
  if (std::exchange(pack_room_of_, members) != members) pack_room_ = MeasurePackRoom();
  std::vector<Leader::Action> actions = leader_.TakeActions();
  if (actions.empty()) return;
  for (Leader::Action& action : actions) {
    std::visit([this](auto& each) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { Do(each); }, action);
  }
  PublishMetrics();
  changed_.NotifyAll();
}

void PoolEngine::PublishKv() {
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
