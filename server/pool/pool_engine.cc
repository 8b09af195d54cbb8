#include "server/pool/pool_engine.h"

#include <chrono>
#include <map>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/prefill_request.h"
#include "engine/prefill_summary.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/config/config.h"
#include "server/observe/log.h"
#include "server/pool/pool_planner.h"

namespace meshfill {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(50);
constexpr absl::Duration kStopPoll = absl::Milliseconds(10);

Leader::Options LeaderOptions(const v1::Config& config, const IdentifiedModel& model) {
  const v1::PoolSection& pool = config.pool();
  Leader::Options options;
  options.build = absl::StrCat("meshfill ", MESHFILL_VERSION);
  options.model = model.id;
  options.layers = model.shape.layers;
  options.vocab = model.shape.vocab;
  options.links = ConfiguredLinksOf(pool);
  // Epochs of a leader that was started again are later than those before: the time of day says so, and
  // nothing else here asks for it. No pool has a new epoch every millisecond.
  options.first_epoch = static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()));
  options.silence_timeout = ToDuration(pool.silence_timeout());
  options.hang_timeout = ToDuration(pool.hang_timeout());
  options.empty_timeout = ToDuration(pool.empty_timeout());
  return options;
}

}  // namespace

PoolEngine::PoolEngine(const v1::Config& config, IdentifiedModel model, Metrics& metrics)
    : model_(std::move(model)),
      defaults_(ToEngineOptions(config)),
      metrics_(metrics),
      leader_(LeaderOptions(config, model_),
              [this](const PoolCapacity& capacity, int64_t tokens, const PrefillOptions& options) {
                return PlanFor(capacity, tokens, options);
              }) {}

absl::StatusOr<std::unique_ptr<PoolEngine>> PoolEngine::Start(const v1::Config& config, Metrics& metrics) {
  ASSIGN_OR_RETURN(auto model, IdentifyModel(config.model().path(), ToEngineOptions(config).dtype));
  std::unique_ptr<PoolEngine> engine(new PoolEngine(config, std::move(model), metrics));
  ASSIGN_OR_RETURN(auto control, ControlService::Start(config.pool(), *engine));
  {
    const MutexLock lock(engine->mu_);
    engine->control_ = std::move(control);
    engine->DoActions();  // of workers that were faster
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
  {
    const MutexLock lock(mu_);
    capacity = leader_.capacity();
  }
  RETURN_IF_ERROR(CheckPromptOptions(model_.shape, model_name(), tokens, options));
  return PlanFor(capacity, tokens, options);
}

absl::StatusOr<PlanChoice> PoolEngine::PlanFor(const PoolCapacity& capacity, int64_t tokens,
                                               const PrefillOptions& options) const {
  absl::StatusOr<PlanChoice> choice = PlanForPool(model_.shape, defaults_, capacity, tokens, options);
  if (choice.ok()) correction_.Apply(*choice);
  return choice;
}

absl::StatusOr<PrefillResult> PoolEngine::Prefill(std::span<const uint32_t> tokens,
                                                  const PrefillOptions& options, PrefillObserver* observer,
                                                  const StopToken* stop) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  if (options.keep_kv) {
    return absl::InvalidArgumentError(
        "a pool of processes does not return KV caches yet; use an embedded pool");
  }
  RETURN_IF_ERROR(CheckPromptOptions(model_.shape, model_name(), count, options));
  RETURN_IF_ERROR(CheckTokenIds(model_.shape, model_name(), tokens));

  absl::StatusOr<Leader::Result> run = absl::UnknownError("");
  {
    MutexLock lock(mu_);
    waiting_.emplace();
    waiting_->ticket =
        leader_.Submit({.id = options.request_id, .tokens = tokens, .options = options}, MonotonicNow());
    DoActions();
    run = WaitForResult(lock, observer, stop);
    waiting_.reset();
  }
  if (!run.ok()) return run.status();
  PrefillResult result{.logits = std::move(run->logits), .top = {}, .plan = std::move(run->plan)};
  result.ranks = std::move(run->ranks);
  result.prefill_seconds = run->seconds;
  RETURN_IF_ERROR(SummarisePrefill(model_.shape, model_name(), run->peak_flops, options.top_k, result));
  // A run that measured the links was planned without knowing them: it says nothing of the predictions to
  // come.
  if (!run->probed) correction_.Observe(result.plan.predicted.seconds, run->seconds);
  return result;
}

absl::StatusOr<Leader::Result> PoolEngine::WaitForResult(MutexLock& lock, PrefillObserver* observer,
                                                         const StopToken* stop) {
  int told = 0;
  while (!waiting_->result.has_value()) {
    if (waiting_->layers_done > told) {
      told = waiting_->layers_done;
      lock.Unlock();
      if (observer != nullptr) observer->OnLayerDone(told, model_.shape.layers);
      lock.Lock();
      continue;
    }
    if (stop != nullptr && stop->stopped()) {
      leader_.CancelRequest(waiting_->ticket, absl::CancelledError("the prefill was stopped"),
                            MonotonicNow());
      DoActions();
      continue;
    }
    changed_.WaitFor(mu_, kStopPoll);
  }
  return *std::move(waiting_->result);
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

void PoolEngine::DoActions() {
  if (control_ == nullptr) return;  // they wait until it is there
  std::vector<Leader::Action> actions = leader_.TakeActions();
  if (actions.empty()) return;
  for (Leader::Action& action : actions) {
    if (auto* send = std::get_if<Leader::Send>(&action)) {
      control_->Send(send->to, std::move(send->message));
    } else if (auto* close = std::get_if<Leader::Close>(&action)) {
      control_->Close(close->connection);
    } else if (auto* answer = std::get_if<Leader::Answer>(&action)) {
      if (waiting_.has_value()) waiting_->result = std::move(answer->result);
    } else if (auto* layers = std::get_if<Leader::LayersDone>(&action)) {
      if (waiting_.has_value()) waiting_->layers_done = layers->layers;
    } else if (auto* line = std::get_if<Leader::LogLine>(&action)) {
      Log(line->text);
    }
  }
  PublishMetrics();
  changed_.NotifyAll();
}

void PoolEngine::PublishMetrics() {
  std::map<std::string, int> ranks;
  for (const Leader::WorkerView& worker : leader_.workers()) {
    ranks[WorkerStateName(worker.state)] += static_cast<int>(worker.offer->ranks());
  }
  const Leader::Counters& counters = leader_.counters();
  metrics_.SetWorkers({.ranks_by_state = std::move(ranks),
                       .epochs = counters.epochs,
                       .joins = counters.joins,
                       .losses = counters.losses,
                       .refusals = counters.refusals,
                       .retries = counters.retries});
  metrics_.SetPeakFlops(leader_.peak_flops());
}

}  // namespace meshfill
