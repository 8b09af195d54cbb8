#include "engine/embedded_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/comm/in_process.h"
#include "engine/embedded_pool.h"
#include "engine/kv_budget.h"
#include "engine/plan/pieces.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_request.h"
#include "engine/prefill_summary.h"
#include "engine/run/local_ranks.h"
#include "engine/run/rank_runner.h"
#include "engine/run/rank_weights.h"
#include "engine/run/timeline_recorder.h"
#include "engine/run_places.h"
#include "engine/speed/pool_profile.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

absl::Status CheckOptions(const EngineOptions& options) {
  if (options.ranks < 1 || options.ranks > kMaxHostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks is ", options.ranks, "; an embedded pool has 1 to ", kMaxHostRanks));
  }
  if (options.threads < 0) return absl::InvalidArgumentError("threads is negative; 0 means one per core");
  return absl::OkStatus();
}

// Reports a layer once the last rank has finished it. Each piece of a prompt has all layers.
class LayerProgress {
 public:
  LayerProgress(int ranks, size_t layers, PrefillObserver* observer)
      : remaining_(layers, ranks), observer_(observer) {}

  void RankFinished(int layer) {
    const MutexLock lock(mu_);
    if (--remaining_[layer] > 0 || observer_ == nullptr) return;
    observer_->OnLayerDone(layer + 1, static_cast<int>(remaining_.size()));
  }

 private:
  Mutex mu_;
  std::vector<int> remaining_;  // ranks that have not finished the layer
  PrefillObserver* const observer_;
};

class EmbeddedEngine : public PrefillEngine {
 public:
  EmbeddedEngine(const EngineOptions& options, EmbeddedPool pool, const PoolNotes& notes)
      : options_(options),
        notes_(notes),
        pool_(std::move(pool)),
        model_name_(std::filesystem::path(options.model_path).lexically_normal().filename().string()),
        backend_name_(pool_.devices.front()->name()),
        kv_store_(KvBudgetBytes(pool_, options.kv_memory_bytes, options.kv_host_memory_bytes), MonotonicNow,
                  KvMemoryOfDevices(pool_)),
        uses_cache_(options.kv_cache.value_or(true)),
        caches_all_(options.kv_cache.value_or(pool_.hardware->in_host_memory())),
        places_(pool_.capacity.memory_budget_bytes, options.ranks, kLiveRuns) {
    if (model_name_.empty()) {  // the path ends in a slash
      model_name_ =
          std::filesystem::path(options.model_path).lexically_normal().parent_path().filename().string();
    }
  }

  const ModelShape& model() const override { return pool_.models.front()->shape(); }
  const std::string& model_name() const override { return model_name_; }
  const std::string& backend_name() const override { return backend_name_; }
  int ranks() const override { return lost_ ? 0 : options_.ranks; }
  double peak_flops() const override { return pool_.peak_flops; }
  KvStore* kv_store() override { return &kv_store_; }
  int capacity() const override { return kLiveRuns; }

  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const override {
    ASSIGN_OR_RETURN(PlannedPrefill planned, Plan(tokens, options, CachedTokens(tokens, options)));
    return std::move(planned.choice);
  }

  int64_t CachedTokens(int64_t tokens, const PrefillOptions& options) const override {
    if (!ReadsCache(options)) return 0;
    return UsableCachedTokens(options_, options, places_.RanksOf(options.submeshes),
                              kv_store_.PrefixTokens(*options.block_names), tokens);
  }

  // Weights that stream would be read once more for each sub-mesh, by the same link. No sub-mesh counts as
  // faster than the pool: a prompt that is alone takes all ranks, as its plan says.
  std::vector<SubmeshSeconds> Submeshes(int64_t tokens, const PrefillOptions& options) const override {
    if (pool_.capacity.weights.mode != WeightMode::kResident) return {};
    std::vector<SubmeshSeconds> submeshes =
        SubmeshesUpTo(std::min(options_.ranks, kLiveRuns), options,
                      [&](const PrefillOptions& on_submesh) { return MakePlan(tokens, on_submesh); });
    if (submeshes.empty()) return submeshes;
    const absl::StatusOr<PlanChoice> whole = MakePlan(tokens, options);
    const double least_seconds = whole.ok() ? whole->plan.predicted.seconds : 0;
    for (SubmeshSeconds& each : submeshes) each.seconds = std::max(each.seconds, least_seconds);
    return submeshes;
  }

  absl::StatusOr<std::unique_ptr<Prefill>> Start(const PrefillRequest& request,
                                                 PrefillObserver* observer) override;

 private:
  class Run;

  struct PlannedPrefill {
    PlanChoice choice;
    int64_t cached_tokens = 0;               // tokens found in the cache
    std::shared_ptr<const KvSlabs> prefix;   // K and V of the cached tokens
    std::shared_ptr<KvPrompt> kv = nullptr;  // where K and V of the other tokens go; null: nowhere
  };

  bool ReadsCache(const PrefillOptions& options) const {
    return uses_cache_ && options.block_names != nullptr && !options.ignore_cache;
  }
  // Whether a prompt's K and V go to the cache though no client wants them kept.
  bool Caches(const PrefillOptions& options) const {
    return uses_cache_ && caches_all_ && options.block_names != nullptr;
  }
  // What runs: behind `cached_tokens`, where that is faster.
  absl::StatusOr<PlannedPrefill> Plan(int64_t tokens, const PrefillOptions& options,
                                      int64_t cached_tokens) const;
  absl::StatusOr<PlanChoice> PlanBehind(int64_t cached_tokens, int64_t tokens,
                                        const PrefillOptions& options) const;
  // Called where predictions stay wrong: the next start measures the speed anew.
  void ForgetWrongSpeed();
  // A place where the plan has room; of those on which as many compute, one whose device has the prefix.
  absl::StatusOr<RunPlaces::Place> TakePlace(const PrefillOptions& options, const PlannedPrefill& planned);
  // Gives K and V a place, where a client, the cache or later pieces want them.
  absl::Status PrepareKv(int64_t tokens, const PrefillOptions& options, PlannedPrefill& planned);

  const EngineOptions options_;
  const PoolNotes notes_;
  const EmbeddedPool pool_;
  std::string model_name_;
  const std::string backend_name_;
  KvStore kv_store_;
  const bool uses_cache_;  // prompts begin behind what others have in common with them
  const bool caches_all_;  // K and V are cached that no client wants, too
  SpeedCorrection correction_;
  std::atomic<bool> speed_forgotten_{false};
  std::atomic<bool> lost_{false};  // a device has failed for good
  RunPlaces places_;
};

absl::StatusOr<PlanChoice> EmbeddedEngine::PlanBehind(int64_t cached_tokens, int64_t tokens,
                                                      const PrefillOptions& options) const {
  const int ranks = places_.RanksOf(options.submeshes);
  PlanRequest request = PlanRequestOf(options_, options, tokens - cached_tokens);
  request.ranks = ranks;
  request.memory_budget_bytes = places_.BudgetOf(options.submeshes);
  request.one_memory = pool_.capacity.one_memory;
  request.weights = pool_.capacity.weights.Share(ranks, options_.ranks);
  if (request.one_memory) {  // one copy, whoever reads it
    request.weights.loaded_bytes = pool_.capacity.weights.loaded_bytes;
  }
  // What is kept is in the host's memory: a part of the ranks' budget where theirs is the same. There the
  // cache takes what is free.
  request.kv_on_host = !pool_.hardware->in_host_memory();
  request.keeps_kv = options.kv != nullptr || (request.kv_on_host && Caches(options));
  request.cached_tokens = cached_tokens;
  if (cached_tokens > 0) request.layout = LayoutKind::kStriped;
  const int64_t granule_tokens = GranuleTokens(options_, options, ranks);
  const auto plan = [&](PoolSpeed speed, const Topology&) {
    if (options.submeshes > 1) speed.lone_rank_speedup = 1;  // others compute on the other sub-meshes
    return MakePlanInPieces(model(), speed, request, granule_tokens);
  };
  ASSIGN_OR_RETURN(PlanChoice choice, correction_.Plan(pool_.capacity.speed, /*topology=*/{}, plan));
  RETURN_IF_ERROR(CheckKvOfPieces(model(), request, choice, kv_store_.budget_bytes()));
  return choice;
}

void EmbeddedEngine::ForgetWrongSpeed() {
  if (options_.speed_profile_path.empty() || !correction_.StaysWrong() || speed_forgotten_.exchange(true))
    return;
  const std::string key = pool_.hardware->SpeedKey(model(), pool_.devices);
  const absl::Status forgotten = ForgetPoolSpeed(options_.speed_profile_path, key);
  const PartFactors factors = correction_.factors();
  notes_(absl::StrFormat(
             "the pool's speed is wrong: products take %.2g and attention %.2g times as long as it says, for "
             "%d prefills; %s",
             factors.products, factors.attention, SpeedCorrection::kWrongPrefills,
             forgotten.ok() ? absl::StrCat("it is dropped from ", options_.speed_profile_path,
                                           ", and the next start measures it")
                            : absl::StrCat(forgotten.message(), "; start with serve --measure")),
         /*warning=*/true);
}

absl::StatusOr<EmbeddedEngine::PlannedPrefill> EmbeddedEngine::Plan(int64_t tokens,
                                                                    const PrefillOptions& options,
                                                                    int64_t cached_tokens) const {
  if (lost_) return absl::UnavailableError("a device of this pool has failed; start the server anew");
  RETURN_IF_ERROR(CheckPromptOptions(model(), model_name_, tokens, options));
  absl::StatusOr<PlanChoice> cold = PlanBehind(0, tokens, options);
  if (cached_tokens > 0) {
    absl::StatusOr<PlanChoice> behind = PlanBehind(cached_tokens, tokens, options);
    const bool better =
        behind.ok() && (!cold.ok() || behind->plan.predicted.seconds < cold->plan.predicted.seconds);
    if (better) {
      return PlannedPrefill{.choice = *std::move(behind), .cached_tokens = cached_tokens, .prefix = {}};
    }
  }
  if (!cold.ok()) return cold.status();
  return PlannedPrefill{.choice = *std::move(cold), .cached_tokens = 0, .prefix = {}};
}

absl::StatusOr<RunPlaces::Place> EmbeddedEngine::TakePlace(const PrefillOptions& options,
                                                           const PlannedPrefill& planned) {
  return places_.Take(options.submeshes, planned.choice.plan.predicted.run_bytes, [&](int first_rank) {
    if (planned.prefix == nullptr) return false;
    const auto& slabs = planned.prefix->pieces.back().run->slabs;
    return slabs.front().front()->On(*pool_.devices[static_cast<size_t>(first_rank)]).has_value();
  });
}

absl::Status EmbeddedEngine::PrepareKv(int64_t tokens, const PrefillOptions& options,
                                       PlannedPrefill& planned) {
  planned.kv = options.kv;
  const bool in_pieces = !planned.choice.pieces.empty();
  if (planned.kv == nullptr && (in_pieces || Caches(options))) {
    auto kv = std::make_shared<KvPrompt>(KvShapeOf(model()), tokens);
    const int64_t new_bytes = kv->shape().layers * kv->shape().LayerBytes(tokens - planned.cached_tokens);
    if (kv_store_.AdmitToCache(kv, new_bytes)) {
      planned.kv = std::move(kv);
    } else if (in_pieces) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the prompt fits the memory in pieces alone, and the ", new_bytes,
                       " bytes of K and V that stay between them have no room beside what leases hold; try "
                       "again later, or raise kv.memory_bytes (behind GPUs kv.host_memory_bytes)"));
    }
  }
  if (planned.kv != nullptr && in_pieces) planned.kv->KeepForRuns();
  return absl::OkStatus();
}

// One prompt on all ranks or on those of a sub-mesh, in one piece or more. Where a rank fails, the others are
// stopped and woken.
class EmbeddedEngine::Run final : public Prefill {
 public:
  Run(EmbeddedEngine& engine, const PrefillRequest& request, PlannedPrefill planned, RunPlaces::Place place,
      PrefillObserver* observer)
      : engine_(engine),
        place_(std::move(place)),
        request_(request),
        start_(std::chrono::steady_clock::now()),
        pieces_(planned.choice.pieces.empty() ? std::vector<meshfill::Plan>{planned.choice.plan}
                                              : std::move(planned.choice.pieces)),
        kv_(std::move(planned.kv)),
        before_(std::move(planned.prefix)),
        progress_(place_.ranks(), pieces_.size() * engine.model().layers, observer),
        result_{.plan = std::move(planned.choice.plan),
                .pieces = static_cast<int>(pieces_.size()),
                .piece_tokens = pieces_.size() > 1 ? pieces_.front().layout.tokens() : 0,
                .cached_tokens = planned.cached_tokens,
                .ranks = std::vector<RankStats>(place_.ranks())},
        outputs_(place_.ranks(), absl::StatusOr<RankOutput>(absl::UnknownError(""))),
        ends_(place_.ranks()) {
    const size_t kept_spans = request.options.keep_timeline ? TimelineRecorder::kCapacity : 0;
    for (int rank = 0; rank < place_.ranks(); ++rank) {
      recorders_.emplace_back(rank, start_, kept_spans, &stop_);
    }
  }

  // Called once, before anything else: each rank gets a stream and begins.
  absl::Status Begin() {
    std::vector<Stream*> by_rank;
    for (int rank = 0; rank < place_.ranks(); ++rank) {
      ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device(rank).NewStream(&stop_));
      by_rank.push_back(stream.get());
      streams_.push_back(std::move(stream));
    }
    communicators_ = MakeInProcessCommunicators(by_rank, &stop_);
    BeginPiece();
    if (pieces_.size() == 1) return absl::OkStatus();
    try {
      driver_ = std::thread([this] { RunOtherPieces(); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(absl::StrCat("no thread could be started for a prompt in pieces (",
                                                       error.what(), "); raise the limit of threads"));
    }
    return absl::OkStatus();
  }

  ~Run() override {
    Stop();
    Join();
  }

  void Stop() override { stop_.Stop(); }
  void Pause() override {
    stop_.Pause();
    place_.SetComputes(false);
  }
  void Resume() override {
    place_.SetComputes(true);
    stop_.Resume();
  }

  uint64_t place() const override { return static_cast<uint64_t>(place_.first_rank()) + 1; }

  absl::StatusOr<PrefillResult> Wait() override {
    Join();
    RETURN_IF_ERROR(FirstCause(outputs_));
    const auto end = *std::max_element(ends_.begin(), ends_.end());
    result_.paused_seconds = absl::ToDoubleSeconds(stop_.PausedTime());
    result_.prefill_seconds = std::chrono::duration<double>(end - start_).count();
    AddStats();
    for (absl::StatusOr<RankOutput>& output : outputs_) {
      if (!output->logits.empty()) result_.logits = std::move(output->logits);
    }
    if (RunsAsPredicted()) {
      engine_.correction_.Observe(result_.plan.predicted, MeasuredSecondsOf(result_));
      engine_.ForgetWrongSpeed();
    }
    RETURN_IF_ERROR(
        SummarisePrefill(engine_.model(), engine_.model_name_, PeakFlops(), request_.options.top_k, result_));
    if (request_.options.keep_timeline) result_.timeline = CollectTimeline(std::move(recorders_));
    const auto& names = request_.options.block_names;
    if (kv_ != nullptr && names != nullptr && engine_.uses_cache_) engine_.kv_store_.Enter(*names, *kv_);
    return std::move(result_);
  }

 private:
  const meshfill::Plan& plan() const { return pieces_[piece_]; }
  Device& device(int rank) const {
    return *engine_.pool_.devices[static_cast<size_t>(place_.first_rank() + rank)];
  }
  std::span<const std::shared_ptr<const Model>> models() const {
    return std::span(engine_.pool_.models).subspan(place_.first_rank(), place_.ranks());
  }
  // False on a sub-mesh of ranks that share cores: how long it took depends on what ran beside it.
  bool RunsAsPredicted() const {
    return place_.ranks() == engine_.options_.ranks || engine_.pool_.capacity.speed.lone_rank_speedup == 1;
  }
  // The most that its ranks can do: where ranks share cores, more than their part.
  double PeakFlops() const {
    const double part = static_cast<double>(place_.ranks()) / engine_.options_.ranks;
    return engine_.pool_.peak_flops * std::min(1.0, part * engine_.pool_.capacity.speed.lone_rank_speedup);
  }
  int64_t tokens_ahead() const {
    return std::ssize(request_.tokens) - plan().cached_tokens - plan().layout.tokens();
  }

  void BeginPiece() {
    if (kv_ != nullptr) kv_->Begin(plan().layout, before_);
    std::vector<bool> reads_head;
    for (int rank = 0; rank < place_.ranks(); ++rank) {
      reads_head.push_back(ReadsHead(plan(), rank, tokens_ahead() == 0));
    }
    weights_.emplace(models(), engine_.pool_.peers.get(), reads_head, &stop_);
    ranks_.emplace();
    ranks_->Start(
        place_.ranks(), [this](int rank) { return RunOne(rank); },
        [this](int rank, absl::StatusOr<RankOutput> output) { OnDone(rank, std::move(output)); });
  }

  // Runs on a thread of its own, since a caller need not be in Wait.
  void RunOtherPieces() {
    while (true) {
      ranks_->Join();
      if (!FirstCause(outputs_).ok() || piece_ + 1 == pieces_.size()) return;
      AddStats();
      ++piece_;
      before_ = kv_->slabs();
      BeginPiece();
    }
  }

  void Join() {
    if (driver_.joinable()) driver_.join();
    if (ranks_.has_value()) ranks_->Join();
  }

  // Adds the stats of the piece that has ended.
  void AddStats() {
    for (size_t rank = 0; rank < outputs_.size(); ++rank) result_.ranks[rank] += outputs_[rank]->stats;
  }

  absl::StatusOr<RankOutput> RunOne(int rank) {
    const std::span<const uint32_t> tokens =
        request_.tokens.subspan(static_cast<size_t>(plan().cached_tokens));
    const std::vector<uint32_t> ids = plan().layout.Deal(rank, tokens);
    const int layers_before = static_cast<int>(piece_) * engine_.model().layers;
    const absl::Duration paused_before = stop_.PausedTime();
    const RankPrompt prompt = {.plan = plan(),
                               .ids = ids,
                               .kv = kv_.get(),
                               .prefix = before_.get(),
                               .tokens_ahead = tokens_ahead()};
    absl::StatusOr<RankOutput> output =
        RunRank({.prompts = {&prompt, 1},
                 .model = *models()[rank],
                 .weights = weights_->feed(rank),
                 .reader = weights_->reader(rank),
                 .rank = rank,
                 .stream = *streams_[rank],
                 .communicator = *communicators_[rank],
                 .wait_timeout = PeerWaitTimeout(plan()),
                 .on_layer_done = [&](int layer) { progress_.RankFinished(layers_before + layer); },
                 .recorder = &recorders_[rank]});
    if (output.ok()) output->stats.total_seconds -= absl::ToDoubleSeconds(stop_.PausedTime() - paused_before);
    return output;
  }

  void OnDone(int rank, absl::StatusOr<RankOutput> output) {
    outputs_[rank] = std::move(output);
    ends_[rank] = ToSteadyTime(stop_.Now().run_time());
    if (outputs_[rank].ok()) return;
    Stop();
    communicators_[rank]->Abort(outputs_[rank].status());
    streams_[rank]->Finish().IgnoreError();  // what is queued uses the request's memory, and weights
    if (device(rank).lost()) engine_.lost_ = true;
  }

  EmbeddedEngine& engine_;
  RunPlaces::Place place_;  // given back after all that follows
  const PrefillRequest request_;
  const std::chrono::steady_clock::time_point start_;
  StopToken stop_;
  const std::vector<meshfill::Plan> pieces_;
  size_t piece_ = 0;                       // the piece that runs
  const std::shared_ptr<KvPrompt> kv_;     // null: K and V go nowhere
  std::shared_ptr<const KvSlabs> before_;  // K and V of the tokens before the piece; null: there are none
  std::vector<std::unique_ptr<Stream>> streams_;  // by rank of the run, as all that follows
  std::vector<std::unique_ptr<Communicator>> communicators_;
  LayerProgress progress_;
  PrefillResult result_;
  std::vector<TimelineRecorder> recorders_;
  std::vector<absl::StatusOr<RankOutput>> outputs_;
  std::vector<std::chrono::steady_clock::time_point> ends_;  // earlier by the pauses before
  std::optional<RankWeights> weights_;                       // weights of the piece
  std::optional<LocalRanks> ranks_;  // threads of the piece; last but one: they use all of the above
  std::thread driver_;               // runs a prompt in pieces; last: it uses all of the above
};

absl::StatusOr<std::unique_ptr<Prefill>> EmbeddedEngine::Start(const PrefillRequest& request,
                                                               PrefillObserver* observer) {
  const PrefillOptions& options = request.options;
  const int64_t tokens = std::ssize(request.tokens);
  std::shared_ptr<const KvSlabs> prefix;  // held from here on
  int64_t cached_tokens = 0;
  if (tokens > 0 && ReadsCache(options)) {
    const bool charged = options.kv != nullptr && options.kv->charged();
    prefix = kv_store_.FindPrefix(
        *options.block_names, charged ? options.kv->bytes() / tokens : 0, [&](int64_t cached) {
          return UsableCachedTokens(options_, options, places_.RanksOf(options.submeshes), cached, tokens);
        });
    cached_tokens = prefix->tokens();
  }
  ASSIGN_OR_RETURN(PlannedPrefill planned, Plan(tokens, options, cached_tokens));
  if (planned.cached_tokens > 0) {
    planned.prefix = std::make_shared<const KvSlabs>(FirstTokens(*prefix, planned.cached_tokens));
  }
  prefix.reset();
  RETURN_IF_ERROR(CheckTokenIds(model(), model_name_, request.tokens));
  RETURN_IF_ERROR(CheckSchedule(planned.choice.plan.schedule));
  for (const meshfill::Plan& piece : planned.choice.pieces) RETURN_IF_ERROR(CheckSchedule(piece.schedule));
  ASSIGN_OR_RETURN(RunPlaces::Place place, TakePlace(options, planned));
  RETURN_IF_ERROR(PrepareKv(tokens, options, planned));
  kv_store_.MakeRoom();
  if (ReadsCache(options)) kv_store_.CountTokens(planned.cached_tokens, tokens - planned.cached_tokens);
  auto run = std::make_unique<Run>(*this, request, std::move(planned), std::move(place), observer);
  RETURN_IF_ERROR(run->Begin());
  return run;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillEngine>> LoadEmbeddedEngine(const EngineOptions& options,
                                                                  const PoolNotes& notes) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(EmbeddedPool pool, LoadEmbeddedPool(options, notes));
  return std::make_unique<EmbeddedEngine>(options, std::move(pool), notes);
}

}  // namespace meshfill
