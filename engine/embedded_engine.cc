#include "engine/embedded_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/comm/in_process.h"
#include "engine/devices/free_memory.h"
#include "engine/embedded_pool.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_request.h"
#include "engine/prefill_summary.h"
#include "engine/run/local_ranks.h"
#include "engine/run/rank_runner.h"
#include "engine/run/timeline_recorder.h"
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

// Bytes of what is kept for clients: of the ranks' memory where that is the host's, else of the host's.
int64_t KvBudgetBytes(const EngineOptions& options, const EmbeddedPool& pool) {
  constexpr int64_t kDefaultPart = 8;  // of what activations may take, beside it
  if (!pool.hardware->in_host_memory()) {
    return options.kv_host_memory_bytes.value_or(DefaultMemoryBudgetBytes() / kDefaultPart);
  }
  return options.kv_memory_bytes.value_or(pool.capacity.memory_budget_bytes / kDefaultPart);
}

// Reports a layer once the last rank has finished it.
class LayerProgress {
 public:
  LayerProgress(int ranks, int layers, PrefillObserver* observer)
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

// The status that explains the others: a rank's own failure, not the abort that it caused elsewhere.
absl::Status FirstCause(const std::vector<absl::StatusOr<RankOutput>>& outputs) {
  absl::Status cause;
  for (const absl::StatusOr<RankOutput>& output : outputs) {
    if (output.ok()) continue;
    if (cause.ok() || absl::IsCancelled(cause) || absl::IsAborted(cause)) cause = output.status();
  }
  return cause;
}

class EmbeddedEngine : public PrefillEngine {
 public:
  EmbeddedEngine(const EngineOptions& options, EmbeddedPool pool)
      : options_(options),
        pool_(std::move(pool)),
        model_name_(std::filesystem::path(options.model_path).lexically_normal().filename().string()),
        backend_name_(pool_.devices.front()->name()),
        kv_store_(KvBudgetBytes(options, pool_)) {
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

  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const override {
    if (lost_) return absl::UnavailableError("a device of this pool has failed; start the server anew");
    const ModelShape& shape = model();
    RETURN_IF_ERROR(CheckPromptOptions(shape, model_name_, tokens, options));
    PlanRequest request = PlanRequestOf(options_, options, tokens);
    request.memory_budget_bytes = pool_.capacity.memory_budget_bytes;
    request.one_memory = pool_.capacity.one_memory;
    // What is kept is in the host's memory: a part of the ranks' budget where theirs is the same.
    request.keeps_kv = options.kv != nullptr && pool_.hardware->in_host_memory();
    absl::StatusOr<PlanChoice> choice = meshfill::MakePlan(shape, pool_.capacity.speed, request);
    if (choice.ok()) correction_.Apply(*choice);
    return choice;
  }

  absl::StatusOr<std::unique_ptr<Prefill>> Start(const PrefillRequest& request,
                                                 PrefillObserver* observer) override;

 private:
  class Run;

  const EngineOptions options_;
  const EmbeddedPool pool_;
  std::string model_name_;
  const std::string backend_name_;
  KvStore kv_store_;
  SpeedCorrection correction_;
  std::atomic<bool> lost_{false};     // a device has failed for good
  std::atomic<bool> running_{false};  // a Run lives: its ranks have the memory
};

// One prompt on all ranks. Where a rank fails, the others are stopped and woken.
class EmbeddedEngine::Run final : public Prefill {
 public:
  Run(EmbeddedEngine& engine, const PrefillRequest& request, Plan plan, PrefillObserver* observer)
      : engine_(engine),
        request_(request),
        start_(std::chrono::steady_clock::now()),
        progress_(engine.options_.ranks, engine.model().layers, observer),
        result_{.plan = std::move(plan)},
        outputs_(engine.options_.ranks, absl::StatusOr<RankOutput>(absl::UnknownError(""))),
        ends_(engine.options_.ranks) {
    if (request.options.kv != nullptr) request.options.kv->Begin(result_.plan.layout);
    const size_t kept_spans = request.options.keep_timeline ? TimelineRecorder::kCapacity : 0;
    for (int rank = 0; rank < engine.options_.ranks; ++rank) {
      recorders_.emplace_back(rank, start_, kept_spans);
    }
  }

  // Once, before anything else: each rank gets a stream and begins.
  absl::Status Begin() {
    std::vector<Stream*> by_rank;
    for (const std::shared_ptr<Device>& device : engine_.pool_.devices) {
      ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->NewStream(&stop_));
      by_rank.push_back(stream.get());
      streams_.push_back(std::move(stream));
    }
    communicators_ = MakeInProcessCommunicators(by_rank);
    ranks_.Start(
        engine_.options_.ranks, [this](int rank) { return RunOne(rank); },
        [this](int rank, absl::StatusOr<RankOutput> output) { OnDone(rank, std::move(output)); });
    return absl::OkStatus();
  }

  ~Run() override {
    Stop();
    ranks_.Join();
    engine_.running_ = false;
  }

  void Stop() override { stop_.Stop(); }

  absl::StatusOr<PrefillResult> Wait() override {
    ranks_.Join();
    RETURN_IF_ERROR(FirstCause(outputs_));
    const auto end = *std::max_element(ends_.begin(), ends_.end());
    result_.prefill_seconds = std::chrono::duration<double>(end - start_).count();
    for (absl::StatusOr<RankOutput>& output : outputs_) {
      result_.ranks.push_back(output->stats);
      if (!output->logits.empty()) result_.logits = std::move(output->logits);
    }
    engine_.correction_.Observe(result_.plan.predicted.seconds, result_.prefill_seconds);
    RETURN_IF_ERROR(SummarisePrefill(engine_.model(), engine_.model_name_, engine_.pool_.peak_flops,
                                     request_.options.top_k, result_));
    if (request_.options.keep_timeline) result_.timeline = CollectTimeline(std::move(recorders_));
    return std::move(result_);
  }

 private:
  absl::StatusOr<RankOutput> RunOne(int rank) {
    const std::vector<uint32_t> ids =
        result_.plan.layout.Deal(rank, std::span<const uint32_t>(request_.tokens));
    return RunRank({.plan = result_.plan,
                    .model = *engine_.pool_.models[rank],
                    .rank = rank,
                    .ids = ids,
                    .stream = *streams_[rank],
                    .communicator = *communicators_[rank],
                    .wait_timeout = PeerWaitTimeout(result_.plan),
                    .on_layer_done = [this](int layer) { progress_.RankFinished(layer); },
                    .kv = request_.options.kv.get(),
                    .recorder = &recorders_[rank]});
  }

  void OnDone(int rank, absl::StatusOr<RankOutput> output) {
    outputs_[rank] = std::move(output);
    ends_[rank] = std::chrono::steady_clock::now();
    if (outputs_[rank].ok()) return;
    Stop();
    communicators_[rank]->Abort(outputs_[rank].status());
    streams_[rank]->Finish().IgnoreError();  // what is queued uses the request's memory
    if (engine_.pool_.devices[rank]->lost()) engine_.lost_ = true;
  }

  EmbeddedEngine& engine_;
  const PrefillRequest request_;
  const std::chrono::steady_clock::time_point start_;
  StopToken stop_;
  std::vector<std::unique_ptr<Stream>> streams_;  // by rank, as all that follows
  std::vector<std::unique_ptr<Communicator>> communicators_;
  LayerProgress progress_;
  PrefillResult result_;
  std::vector<TimelineRecorder> recorders_;
  std::vector<absl::StatusOr<RankOutput>> outputs_;
  std::vector<std::chrono::steady_clock::time_point> ends_;
  LocalRanks ranks_;  // last: its threads use all of the above
};

absl::StatusOr<std::unique_ptr<Prefill>> EmbeddedEngine::Start(const PrefillRequest& request,
                                                               PrefillObserver* observer) {
  ASSIGN_OR_RETURN(PlanChoice choice, MakePlan(std::ssize(request.tokens), request.options));
  RETURN_IF_ERROR(CheckTokenIds(model(), model_name_, request.tokens));
  RETURN_IF_ERROR(CheckSchedule(choice.plan.schedule));
  if (running_.exchange(true)) {
    return absl::ResourceExhaustedError("an embedded pool runs one prefill at a time; wait for its end");
  }
  auto run = std::make_unique<Run>(*this, request, std::move(choice.plan), observer);
  RETURN_IF_ERROR(run->Begin());
  return run;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillEngine>> LoadEmbeddedEngine(const EngineOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(EmbeddedPool pool, LoadEmbeddedPool(options));
  return std::make_unique<EmbeddedEngine>(options, std::move(pool));
}

}  // namespace meshfill
