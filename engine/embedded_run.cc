#include "engine/embedded_run.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/in_process.h"
#include "engine/prefill_summary.h"
#include "engine/run/local_ranks.h"
#include "engine/run/rank_runner.h"
#include "engine/run/rank_weights.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

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

// On all ranks or on those of a sub-mesh.
class EmbeddedRun final : public Prefill {
 public:
  EmbeddedRun(const EmbeddedRuns& runs, const PrefillRequest& request, PlannedPrefill planned,
              RunPlaces::Place place, PrefillObserver* observer)
      : runs_(runs),
        place_(std::move(place)),
        request_(request),
        start_(std::chrono::steady_clock::now()),
        pieces_(planned.choice.pieces.empty() ? std::vector<Plan>{planned.choice.plan}
                                              : std::move(planned.choice.pieces)),
        kv_(std::move(planned.kv)),
        before_(std::move(planned.prefix)),
        progress_(place_.ranks(), pieces_.size() * runs.model().layers, observer),
        result_{.plan = std::move(planned.choice.plan),
                .pieces = static_cast<int>(pieces_.size()),
                .piece_tokens = pieces_.size() > 1 ? pieces_.front().layout.tokens() : 0,
                .cached_tokens = planned.cached_tokens,
                .ranks = std::vector<RankStats>(place_.ranks()),
                .pool_ranks = place_.pool_ranks()},
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

  ~EmbeddedRun() override {
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
      runs_.on_measured(result_.plan.predicted, MeasuredSecondsOf(result_.prefill_seconds, result_.ranks));
    }
    RETURN_IF_ERROR(
        SummarisePrefill(runs_.model(), runs_.model_name, PeakFlops(), request_.options.top_k, result_));
    if (request_.options.keep_timeline) result_.timeline = CollectTimeline(std::move(recorders_));
    const auto& names = request_.options.block_names;
    if (kv_ != nullptr && names != nullptr) runs_.on_kept(*names, *kv_);
    return std::move(result_);
  }

 private:
  const Plan& plan() const { return pieces_[piece_]; }
  Device& device(int rank) const {
    return *runs_.pool.devices[static_cast<size_t>(place_.first_rank() + rank)];
  }
  std::span<const std::shared_ptr<const Model>> models() const {
    return std::span(runs_.pool.models).subspan(place_.first_rank(), place_.ranks());
  }
  // False on a sub-mesh of ranks that share cores: how long it took depends on what ran beside it.
  bool RunsAsPredicted() const {
    return place_.ranks() == runs_.ranks() || runs_.pool.capacity.speed.lone_rank_speedup == 1;
  }
  // The most that its ranks can do: where ranks share cores, more than their part.
  double PeakFlops() const {
    const double part = static_cast<double>(place_.ranks()) / runs_.ranks();
    return runs_.pool.peak_flops * std::min(1.0, part * runs_.pool.capacity.speed.lone_rank_speedup);
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
    weights_.emplace(models(), runs_.pool.peers.get(), reads_head, &stop_);
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
    const int layers_before = static_cast<int>(piece_) * runs_.model().layers;
    const absl::Duration paused_before = stop_.PausedTime();
    const RankPrompt prompt = {
        .plan = plan(), .ids = ids, .kv = kv_.get(), .prefix = before_.get(), .tokens_ahead = tokens_ahead()};
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
    if (device(rank).lost()) runs_.on_device_lost();
  }

  const EmbeddedRuns& runs_;
  RunPlaces::Place place_;  // given back after all that follows
  const PrefillRequest request_;
  const std::chrono::steady_clock::time_point start_;
  StopToken stop_;
  const std::vector<Plan> pieces_;
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

}  // namespace

absl::StatusOr<std::unique_ptr<Prefill>> BeginEmbeddedRun(const EmbeddedRuns& runs,
                                                          const PrefillRequest& request,
                                                          PlannedPrefill planned, RunPlaces::Place place,
                                                          PrefillObserver* observer) {
  auto run = std::make_unique<EmbeddedRun>(runs, request, std::move(planned), std::move(place), observer);
  RETURN_IF_ERROR(run->Begin());
  return run;
}

}  // namespace meshfill
