#include "engine/embedded_engine.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_pack.h"
#include "engine/embedded_pool.h"
#include "engine/embedded_run.h"
#include "engine/kv_budget.h"
#include "engine/plan/pack.h"
#include "engine/plan/pieces.h"
#include "engine/plan/short_room.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_request.h"
#include "engine/run_places.h"
#include "engine/speed/pool_profile.h"
#include "kernels/monotonic_time.h"
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
        places_(pool_.capacity.memory_budget_bytes, options.ranks, kLiveRuns),
        runs_({.pool = pool_,
               .model_name = model_name_,
               .on_measured = [this](const Prediction& predicted,
                                     const MeasuredSeconds& measured) { OnMeasured(predicted, measured); },
               .on_kept =
                   [this](const KvBlockNames& names, const KvPrompt& kv) {
                     if (uses_cache_) kv_store_.Enter(names, kv);
                   },
               .on_device_lost = [this] { lost_ = true; }}) {
    if (model_name_.empty()) {  // the path ends in a slash
      model_name_ =
          std::filesystem::path(options.model_path).lexically_normal().parent_path().filename().string();
    }
    places_.LeaveToShort(ShortRoomBytes(model(), pool_.capacity.speed, RequestOf(1, OnOneRank({}))));
    pack_room_ = MeasurePackRoom();
  }

  const ModelShape& model() const override { return pool_.models.front()->shape(); }
  const std::string& model_name() const override { return model_name_; }
  const std::string& backend_name() const override { return backend_name_; }
  int ranks() const override { return lost_ ? 0 : options_.ranks; }
  double peak_flops() const override { return pool_.peak_flops; }
  KvStore* kv_store() override { return &kv_store_; }
  int capacity() const override { return kLiveRuns; }

  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const override {
    ASSIGN_OR_RETURN(PlannedPrefill planned, PlanPrompt(tokens, options, CachedTokens(tokens, options)));
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
        SubmeshesUpTo(std::min(options_.ranks, kMostSubmeshes), options,
                      [&](const PrefillOptions& on_submesh) { return MakePlan(tokens, on_submesh); });
    if (submeshes.empty()) return submeshes;
    const absl::StatusOr<PlanChoice> whole = MakePlan(tokens, options);
    const double least_seconds = whole.ok() ? whole->plan.predicted.seconds : 0;
    for (SubmeshSeconds& each : submeshes) each.seconds = std::max(each.seconds, least_seconds);
    return submeshes;
  }

  absl::StatusOr<std::unique_ptr<Prefill>> Start(const PrefillRequest& request,
                                                 PrefillObserver* observer) override;

  PackRoom pack_room() const override;
  PackShare ShareOfPack(int64_t tokens, const PrefillOptions& options) const override;
  absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> StartPack(
      std::span<const PrefillRequest> requests, std::span<PrefillObserver* const> observers) override;

 private:
  bool ReadsCache(const PrefillOptions& options) const {
    return uses_cache_ && options.block_names != nullptr && !options.ignore_cache;
  }
  // Whether a prompt's K and V go to the cache though no client wants them kept.
  bool Caches(const PrefillOptions& options) const {
    return uses_cache_ && caches_all_ && options.block_names != nullptr;
  }
  // The prompt on one rank.
  PrefillOptions OnOneRank(PrefillOptions options) const {
    options.submeshes = options_.ranks;
    return options;
  }
  // Of a plan for one rank.
  PackShare ShareOf(const Plan& plan) const {
    return PackShareOf(model(), pool_.capacity.speed, correction_.factors(), plan, PassBytes());
  }
  // What a rank takes once for a pass, whoever is in it.
  int64_t PassBytes() const { return pool_.capacity.weights.Share(1, options_.ranks).run_bytes; }
  PackRoom MeasurePackRoom() const;
  // With all the memory of the ranks that it has.
  PlanRequest RequestOf(int64_t tokens, const PrefillOptions& options) const;
  // What runs, behind the prefix that it finds in the cache, where that is faster. The request is good.
  absl::StatusOr<PlannedPrefill> FindPlan(const PrefillRequest& request);
  // What runs: behind `cached_tokens`, where that is faster.
  absl::StatusOr<PlannedPrefill> PlanPrompt(int64_t tokens, const PrefillOptions& options,
                                            int64_t cached_tokens) const;
  absl::StatusOr<PlanChoice> PlanBehind(int64_t cached_tokens, int64_t tokens,
                                        const PrefillOptions& options) const;
  void OnMeasured(const Prediction& predicted, const MeasuredSeconds& measured);
  // Called where predictions stay wrong: the next start measures the speed anew.
  void ForgetWrongSpeed();
  // A place where the plan has room; of those on which as many compute, one whose device has the prefix.
  absl::StatusOr<RunPlaces::Place> TakePlace(const PrefillOptions& options, const PlannedPrefill& planned);
  // Gives K and V a place, where a client, the cache or later pieces want them.
  absl::Status PrepareKv(const PrefillRequest& request, PlannedPrefill& planned);

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
  const EmbeddedRuns runs_;  // they use all of the above
  PackRoom pack_room_;       // where nothing lives
};

PlanRequest EmbeddedEngine::RequestOf(int64_t tokens, const PrefillOptions& options) const {
  PlanRequest request = PlanRequestOf(options_, options, tokens);
  request.ranks = places_.RanksOf(options.submeshes);
  request.memory_budget_bytes = places_.BudgetOf(options.submeshes);
  request.one_memory = pool_.capacity.one_memory;
  request.weights = pool_.capacity.weights.Share(request.ranks, options_.ranks);
  if (request.one_memory) {  // one copy, whoever reads it
    request.weights.loaded_bytes = pool_.capacity.weights.loaded_bytes;
  }
  // What is kept is in the host's memory: a part of the ranks' budget where theirs is the same. There the
  // cache takes what is free.
  request.kv_on_host = !pool_.hardware->in_host_memory();
  request.keeps_kv = options.kv != nullptr || (request.kv_on_host && Caches(options));
  return request;
}

absl::StatusOr<PlanChoice> EmbeddedEngine::PlanBehind(int64_t cached_tokens, int64_t tokens,
                                                      const PrefillOptions& options) const {
  PlanRequest request = RequestOf(tokens - cached_tokens, options);
  request.cached_tokens = cached_tokens;
  if (cached_tokens > 0) request.layout = LayoutKind::kStriped;
  const int64_t granule_tokens = GranuleTokens(options_, options, request.ranks);
  return correction_.Plan(pool_.capacity.speed, /*topology=*/{}, [&](PoolSpeed speed, const Topology&) {
    if (options.submeshes > 1) speed.lone_rank_speedup = 1;  // others compute on the other sub-meshes
    const auto plan = [&](int64_t memory_bytes) -> absl::StatusOr<PlanChoice> {
      PlanRequest within = request;
      within.memory_budget_bytes = memory_bytes;
      ASSIGN_OR_RETURN(PlanChoice choice, MakePlanInPieces(model(), speed, within, granule_tokens));
      // For others' sake it runs in pieces only where there is room now for the K and V between them.
      const bool beside_short = memory_bytes < request.memory_budget_bytes;
      RETURN_IF_ERROR(CheckKvOfPieces(
          model(), within, choice,
          beside_short && options.kv == nullptr ? kv_store_.RoomBytes() : kv_store_.budget_bytes()));
      return choice;
    };
    return PlanBesideShort(request.memory_budget_bytes, request.ranks * places_.short_bytes(), plan);
  });
}

void EmbeddedEngine::OnMeasured(const Prediction& predicted, const MeasuredSeconds& measured) {
  correction_.Observe(predicted, measured);
  ForgetWrongSpeed();
}

void EmbeddedEngine::ForgetWrongSpeed() {
  if (options_.speed_profile_path.empty() || !correction_.StaysWrong() || speed_forgotten_.exchange(true))
    return;
  const std::string key = pool_.hardware->SpeedKey(model(), pool_.devices);
  const absl::Status forgotten = ForgetPoolSpeed(options_.speed_profile_path, key);
  notes_(absl::StrCat(correction_.WhatIsWrong(), "; ",
                      forgotten.ok() ? absl::StrCat("it is dropped from ", options_.speed_profile_path,
                                                    ", and the next start measures it")
                                     : absl::StrCat(forgotten.message(), "; start with serve --measure")),
         /*warning=*/true);
}

absl::StatusOr<PlannedPrefill> EmbeddedEngine::PlanPrompt(int64_t tokens, const PrefillOptions& options,
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

absl::Status EmbeddedEngine::PrepareKv(const PrefillRequest& request, PlannedPrefill& planned) {
  const PrefillOptions& options = request.options;
  const int64_t tokens = std::ssize(request.tokens);
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
  const bool cached =
      uses_cache_ && options.block_names != nullptr;  // a lease that ends before changes nothing
  if (planned.kv != nullptr && (in_pieces || cached)) planned.kv->KeepWithoutLease();
  kv_store_.MakeRoom();
  if (ReadsCache(options)) kv_store_.CountTokens(planned.cached_tokens, tokens - planned.cached_tokens);
  return absl::OkStatus();
}

absl::StatusOr<PlannedPrefill> EmbeddedEngine::FindPlan(const PrefillRequest& request) {
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
  ASSIGN_OR_RETURN(PlannedPrefill planned, PlanPrompt(tokens, options, cached_tokens));
  if (planned.cached_tokens > 0) {
    planned.prefix = std::make_shared<const KvSlabs>(FirstTokens(*prefix, planned.cached_tokens));
  }
  RETURN_IF_ERROR(CheckTokenIds(model(), model_name_, request.tokens));
  RETURN_IF_ERROR(CheckSchedule(planned.choice.plan.schedule));
  for (const Plan& piece : planned.choice.pieces) RETURN_IF_ERROR(CheckSchedule(piece.schedule));
  return planned;
}

absl::StatusOr<std::unique_ptr<Prefill>> EmbeddedEngine::Start(const PrefillRequest& request,
                                                               PrefillObserver* observer) {
  ASSIGN_OR_RETURN(PlannedPrefill planned, FindPlan(request));
  ASSIGN_OR_RETURN(RunPlaces::Place place, TakePlace(request.options, planned));
  RETURN_IF_ERROR(PrepareKv(request, planned));
  return BeginEmbeddedRun(runs_, request, std::move(planned), std::move(place), observer);
}

PackShare EmbeddedEngine::ShareOfPack(int64_t tokens, const PrefillOptions& options) const {
  if (pack_room_.ranks == 0 || ChoosesMesh(options)) return {};
  const PrefillOptions on_rank = OnOneRank(options);
  const int64_t cached_tokens = CachedTokens(tokens, on_rank);
  if (tokens - cached_tokens > pack_room_.rank_tokens) return {};
  const absl::StatusOr<PlannedPrefill> planned = PlanPrompt(tokens, on_rank, cached_tokens);
  return planned.ok() && planned->choice.pieces.empty() ? ShareOf(planned->choice.plan) : PackShare{};
}

// A slice of tokens on each rank, or as many as its memory allows.
PackRoom EmbeddedEngine::MeasurePackRoom() const {
  const bool alike = std::all_of(pool_.devices.begin(), pool_.devices.end(),
                                 [](const auto& device) { return device->rows_are_independent(); });
  if (!alike) return {};
  const int64_t tokens = LargestPackTokens(
      std::min(pool_.capacity.speed.slice_tokens, model().context_tokens), [&](int64_t so_many) {
        const absl::StatusOr<PlannedPrefill> planned = PlanPrompt(so_many, OnOneRank({}), 0);
        return planned.ok() && planned->choice.pieces.empty();
      });
  if (tokens == 0) return {};
  PackRoom room = {.ranks = options_.ranks, .rank_tokens = tokens};
  if (const int64_t budget = places_.BudgetOf(options_.ranks); budget > 0) {
    room.rank_bytes = std::max<int64_t>(0, budget - PassBytes());
  }
  return room;
}

PackRoom EmbeddedEngine::pack_room() const {
  PackRoom room = pack_room_;
  if (room.ranks > 0 && places_.BudgetOf(1) > 0) {
    room.rank_bytes = std::clamp<int64_t>(places_.MostRankBytes() - PassBytes(), 0, room.rank_bytes);
  }
  return room;
}

absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> EmbeddedEngine::StartPack(
    std::span<const PrefillRequest> requests, std::span<PrefillObserver* const> observers) {
  if (pack_room_.ranks == 0) return PrefillEngine::StartPack(requests, observers);
  Pack pack(pack_room_);
  std::vector<int64_t> rank_bytes(static_cast<size_t>(options_.ranks), PassBytes());
  std::vector<PackedPrefill> prompts;
  for (size_t i = 0; i < requests.size(); ++i) {
    PrefillRequest request = requests[i];
    request.options = OnOneRank(request.options);
    ASSIGN_OR_RETURN(PlannedPrefill planned, FindPlan(request));
    const PackShare share = ShareOf(planned.choice.plan);
    const std::optional<int> rank = planned.choice.pieces.empty() ? pack.Add(share) : std::nullopt;
    if (!rank.has_value()) {  // its cached prefix has gone since it was chosen
      return absl::FailedPreconditionError("the prompt is too long by now to share a pass");
    }
    rank_bytes[static_cast<size_t>(*rank)] += share.bytes;
    prompts.push_back({request, std::move(planned), *rank, observers[i]});
  }
  const int64_t most_bytes = *std::max_element(rank_bytes.begin(), rank_bytes.end());
  ASSIGN_OR_RETURN(RunPlaces::Place place, places_.Take(1, options_.ranks * most_bytes));
  for (PackedPrefill& prompt : prompts) prompt.planned.choice.plan.predicted.seconds = pack.seconds();
  for (PackedPrefill& prompt : prompts) RETURN_IF_ERROR(PrepareKv(prompt.request, prompt.planned));
  return BeginEmbeddedPack(runs_, std::move(prompts), std::move(place));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillEngine>> LoadEmbeddedEngine(const EngineOptions& options,
                                                                  const PoolNotes& notes) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(EmbeddedPool pool, LoadEmbeddedPool(options, notes));
  return std::make_unique<EmbeddedEngine>(options, std::move(pool), notes);
}

}  // namespace meshfill
