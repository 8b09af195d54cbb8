#include "engine/embedded_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/comm/in_process.h"
#include "engine/devices/embedded_pool.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_request.h"
#include "engine/prefill_summary.h"
#include "engine/run/rank_runner.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr int kMaxRanks = 64;

// No peer of this process gets lost, so a wait this long is a bug: it ends the request, never the server.
absl::Duration WaitTimeout(const Plan& plan) {
  return absl::Seconds(60) + 20 * absl::Seconds(plan.predicted.seconds);
}

absl::Status CheckOptions(const EngineOptions& options) {
  if (options.ranks < 1 || options.ranks > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks is ", options.ranks, "; an embedded pool has 1 to ", kMaxRanks));
  }
  if (options.threads < 0) return absl::InvalidArgumentError("threads is negative; 0 means one per core");
  return absl::OkStatus();
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
        backend_name_(pool_.devices.front()->name()) {
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

  absl::StatusOr<PlanChoice> MakePlan(int64_t tokens, const PrefillOptions& options) const override {
    if (lost_) return absl::UnavailableError("a device of this pool has failed; start the server anew");
    const ModelShape& shape = model();
    RETURN_IF_ERROR(CheckPromptOptions(shape, model_name_, tokens, options));
    PlanRequest request = PlanRequestOf(options_, options, tokens);
    request.memory_budget_bytes = pool_.capacity.memory_budget_bytes;
    request.one_memory = pool_.capacity.one_memory;
    absl::StatusOr<PlanChoice> choice = meshfill::MakePlan(shape, pool_.capacity.speed, request);
    if (choice.ok()) correction_.Apply(*choice);
    return choice;
  }

  absl::StatusOr<PrefillResult> Prefill(std::span<const uint32_t> tokens, const PrefillOptions& options,
                                        PrefillObserver* observer, const StopToken* stop) override {
    ASSIGN_OR_RETURN(PlanChoice choice, MakePlan(static_cast<int64_t>(tokens.size()), options));
    RETURN_IF_ERROR(CheckTokenIds(model(), model_name_, tokens));
    RETURN_IF_ERROR(CheckSchedule(choice.plan.schedule));

    PrefillResult result{.plan = std::move(choice.plan)};
    if (options.keep_kv) {
      const ModelShape& shape = model();
      result.kv.emplace(shape.layers, shape.kv_heads, shape.head_dim, static_cast<int64_t>(tokens.size()),
                        shape.dtype);
    }
    const auto start = std::chrono::steady_clock::now();
    std::vector<TimelineRecorder> recorders;
    const size_t kept_spans = options.keep_timeline ? TimelineRecorder::kCapacity : 0;
    for (int rank = 0; rank < options_.ranks; ++rank) recorders.emplace_back(rank, start, kept_spans);
    std::vector<absl::StatusOr<RankOutput>> outputs = RunRanks(
        result.plan, tokens, result.kv.has_value() ? &*result.kv : nullptr, recorders, observer, stop);
    result.prefill_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    RETURN_IF_ERROR(FirstCause(outputs));
    for (absl::StatusOr<RankOutput>& output : outputs) {
      result.ranks.push_back(output->stats);
      if (!output->logits.empty()) result.logits = std::move(output->logits);
    }
    correction_.Observe(result.plan.predicted.seconds, result.prefill_seconds);
    RETURN_IF_ERROR(SummarisePrefill(model(), model_name_, pool_.peak_flops, options.top_k, result));
    if (options.keep_timeline) result.timeline = CollectTimeline(std::move(recorders));
    return result;
  }

 private:
  // One thread for each rank. Where one fails, the others are stopped and woken.
  std::vector<absl::StatusOr<RankOutput>> RunRanks(const Plan& plan, std::span<const uint32_t> tokens,
                                                   KvCache* kv, std::vector<TimelineRecorder>& recorders,
                                                   PrefillObserver* observer, const StopToken* stop) {
    const int ranks = options_.ranks;
    StopToken run_stop(stop);
    std::vector<absl::StatusOr<RankOutput>> outputs(ranks,
                                                    absl::StatusOr<RankOutput>(absl::UnknownError("")));
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<Stream*> by_rank;
    for (int rank = 0; rank < ranks; ++rank) {
      absl::StatusOr<std::unique_ptr<Stream>> stream = pool_.devices[rank]->NewStream(&run_stop);
      if (!stream.ok()) {
        outputs[rank] = stream.status();
        return outputs;
      }
      by_rank.push_back(stream->get());
      streams.push_back(*std::move(stream));
    }
    std::vector<std::unique_ptr<Communicator>> communicators = MakeInProcessCommunicators(by_rank);
    LayerProgress progress(ranks, model().layers, observer);
    const auto stop_others = [&](int rank) {
      run_stop.Stop();
      communicators[rank]->Abort(outputs[rank].status());
    };
    const auto run_rank = [&](int rank) {
      outputs[rank] = RunRank({.plan = plan,
                               .model = *pool_.models[rank],
                               .rank = rank,
                               .tokens = tokens,
                               .stream = *streams[rank],
                               .communicator = *communicators[rank],
                               .wait_timeout = WaitTimeout(plan),
                               .on_layer_done = [&progress](int layer) { progress.RankFinished(layer); },
                               .kv = kv,
                               .recorder = &recorders[rank]});
      if (outputs[rank].ok()) return;
      stop_others(rank);
      streams[rank]->Finish().IgnoreError();  // what is queued uses the request's memory
      if (pool_.devices[rank]->lost()) lost_ = true;
    };
    std::vector<std::thread> threads;
    threads.reserve(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      try {
        threads.emplace_back(run_rank, rank);
      } catch (const std::system_error& error) {
        outputs[rank] = absl::ResourceExhaustedError(
            absl::StrCat("rank ", rank, ": no thread could be started for it (", error.what(),
                         "); use fewer ranks, or raise the limits of threads and memory"));
        stop_others(rank);
      }
    }
    for (std::thread& thread : threads) thread.join();
    return outputs;
  }

  const EngineOptions options_;
  const EmbeddedPool pool_;
  std::string model_name_;
  const std::string backend_name_;
  SpeedCorrection correction_;
  std::atomic<bool> lost_{false};  // a device has failed for good
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillEngine>> LoadEmbeddedEngine(const EngineOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(EmbeddedPool pool, LoadEmbeddedPool(options));
  return std::make_unique<EmbeddedEngine>(options, std::move(pool));
}

}  // namespace meshfill
