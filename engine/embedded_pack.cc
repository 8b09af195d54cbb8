#include "engine/embedded_pack.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "engine/comm/in_process.h"
#include "engine/plan/pass_parts.h"
#include "engine/prefill_summary.h"
#include "engine/run/local_ranks.h"
#include "engine/run/rank_runner.h"
#include "engine/run/rank_weights.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// The pass. Its prompts' prefills hold it, and the last of them ends it.
class EmbeddedPack {
 public:
  EmbeddedPack(const EmbeddedRuns& runs, std::vector<PackedPrefill> prompts, RunPlaces::Place place)
      : runs_(runs),
        place_(std::move(place)),
        start_(std::chrono::steady_clock::now()),
        by_rank_(static_cast<size_t>(place_.ranks())),
        outputs_(static_cast<size_t>(place_.ranks()), RankOutput()) {
    for (PackedPrefill& prompt : prompts) {
      by_rank_[static_cast<size_t>(prompt.rank)].push_back(prompts_.size());
      const auto ids = prompt.request.tokens.subspan(static_cast<size_t>(prompt.planned.cached_tokens));
      tokens_ += std::ssize(ids);
      prompts_.push_back({.given = std::move(prompt), .ids = {ids.begin(), ids.end()}});
    }
    running_ = static_cast<int>(prompts_.size());
    const auto ranks =
        std::count_if(by_rank_.begin(), by_rank_.end(), [](const auto& of) { return !of.empty(); });
    ranks_behind_.assign(static_cast<size_t>(runs.model().layers), static_cast<int>(ranks));
  }

  // Called once, before anything else: each rank gets a stream and begins.
  absl::Status Begin() {
    for (int rank = 0; rank < place_.ranks(); ++rank) {
      ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device(rank).NewStream(&stop_));
      Stream* const only = stream.get();
      communicators_.push_back(std::move(MakeInProcessCommunicators({&only, 1}, &stop_).front()));
      streams_.push_back(std::move(stream));
    }
    // Nothing fails from here on: K and V that have begun cannot begin again.
    for (const Prompt& prompt : prompts_) {
      const PlannedPrefill& planned = prompt.given.planned;
      if (planned.kv != nullptr) planned.kv->Begin(planned.choice.plan.layout, planned.prefix);
    }
    const auto models = std::span(runs_.pool.models).subspan(static_cast<size_t>(place_.first_rank()));
    weights_.emplace(models.first(static_cast<size_t>(place_.ranks())), runs_.pool.peers.get(),
                     std::vector<bool>(static_cast<size_t>(place_.ranks()), true), &stop_);
    ranks_.Start(
        place_.ranks(), [this](int rank) { return RunOne(rank); },
        [this](int rank, absl::StatusOr<RankOutput> output) { OnDone(rank, std::move(output)); });
    return absl::OkStatus();
  }

  // Ends the prompt alone; the others compute on.
  void Stop(size_t i) {
    const MutexLock lock(mu_);
    if (std::exchange(prompts_[i].stopped, true)) return;
    if (--running_ == 0) stop_.Stop();
    changed_.NotifyAll();
  }
  // The prompt's prefill is gone: nobody tells its observer any more.
  void Leave(size_t i) {
    Stop(i);
    {
      const MutexLock lock(mu_);
      prompts_[i].gone = true;
    }
    const MutexLock lock(observers_mu_);
    prompts_[i].given.observer = nullptr;
  }
  void Pause() {
    stop_.Pause();
    place_.SetComputes(false);
  }
  void Resume() {
    place_.SetComputes(true);
    stop_.Resume();
  }

  bool done(size_t i) const {
    const MutexLock lock(mu_);
    return done_ || prompts_[i].stopped;
  }
  void WaitForAny() {
    MutexLock lock(mu_);
    while (!done_ && std::none_of(prompts_.begin(), prompts_.end(),
                                  [](const Prompt& prompt) { return prompt.stopped && !prompt.gone; })) {
      changed_.Wait(mu_);
    }
  }
  absl::StatusOr<PrefillResult> Wait(size_t i) {
    Prompt& prompt = prompts_[i];
    MutexLock lock(mu_);
    while (!done_ && !prompt.stopped) changed_.Wait(mu_);
    if (!done_) return absl::CancelledError("the prompt was stopped");
    return std::move(prompt.result);
  }

 private:
  struct Prompt {
    PackedPrefill given;
    std::vector<uint32_t> ids;  // those that are computed
    bool stopped = false;
    bool gone = false;  // its prefill is
    absl::StatusOr<PrefillResult> result = absl::UnknownError("");
  };

  Device& device(int rank) const {
    return *runs_.pool.devices[static_cast<size_t>(place_.first_rank() + rank)];
  }

  absl::StatusOr<RankOutput> RunOne(int rank) {
    WeightFeed& weights = weights_->feed(static_cast<size_t>(rank));
    const int reader = weights_->reader(static_cast<size_t>(rank));
    std::vector<RankPrompt> prompts;
    for (const size_t i : by_rank_[static_cast<size_t>(rank)]) {
      const PlannedPrefill& planned = prompts_[i].given.planned;
      prompts.push_back({.plan = planned.choice.plan,
                         .ids = prompts_[i].ids,
                         .kv = planned.kv.get(),
                         .prefix = planned.prefix.get()});
    }
    if (prompts.empty()) {
      weights.Leave(reader);
      return RankOutput();
    }
    const absl::Duration paused_before = stop_.PausedTime();
    absl::StatusOr<RankOutput> output =
        RunRank({.prompts = prompts,
                 .model = *runs_.pool.models[static_cast<size_t>(place_.first_rank() + rank)],
                 .weights = weights,
                 .reader = reader,
                 .rank = 0,
                 .stream = *streams_[static_cast<size_t>(rank)],
                 .communicator = *communicators_[static_cast<size_t>(rank)],
                 .wait_timeout = PeerWaitTimeout(prompts.front().plan),
                 .on_layer_done = [this](int layer) { OnLayerDone(layer); }});
    if (output.ok()) output->stats.total_seconds -= absl::ToDoubleSeconds(stop_.PausedTime() - paused_before);
    return output;
  }

  // A prompt ends with the pass, so that its progress is that of the rank which is furthest behind.
  void OnLayerDone(int layer) {
    const MutexLock lock(observers_mu_);
    if (--ranks_behind_[static_cast<size_t>(layer)] > 0) return;
    for (const Prompt& prompt : prompts_) {
      if (PrefillObserver* const observer = prompt.given.observer; observer != nullptr) {
        observer->OnLayerDone(layer + 1, static_cast<int>(ranks_behind_.size()));
      }
    }
  }

  void OnDone(int rank, absl::StatusOr<RankOutput> output) {
    if (!output.ok()) {
      stop_.Stop();
      streams_[static_cast<size_t>(rank)]
          ->Finish()
          .IgnoreError();  // what is queued uses prompts, and weights
      if (device(rank).lost()) runs_.on_device_lost();
    }
    outputs_[static_cast<size_t>(rank)] = std::move(output);
    if (++ranks_done_ < place_.ranks()) return;
    SetResults();
    const MutexLock lock(mu_);
    done_ = true;
    changed_.NotifyAll();
  }

  // On the thread of the last rank, which alone looks at the outputs and the results until it is done.
  void SetResults() {
    const absl::Status cause = FirstCause(outputs_);
    const double seconds =
        std::chrono::duration<double>(ToSteadyTime(stop_.Now().run_time()) - start_).count();
    if (cause.ok()) TellMeasured(seconds);
    for (int of = 0; of < place_.ranks(); ++of) {
      const std::vector<size_t>& prompts = by_rank_[static_cast<size_t>(of)];
      for (size_t k = 0; k < prompts.size(); ++k) {
        Prompt& prompt = prompts_[prompts[k]];
        prompt.result = cause.ok() ? ResultOf(prompt, outputs_[static_cast<size_t>(of)]->logits, k, seconds)
                                   : absl::StatusOr<PrefillResult>(cause);
      }
    }
  }

  PartSeconds PartsOf(size_t rank) const {
    std::vector<PartSeconds> prompts;
    for (const size_t i : by_rank_[rank]) {
      prompts.push_back(prompts_[i].given.planned.choice.plan.predicted.parts);
    }
    return PassParts(runs_.model(), runs_.pool.capacity.speed, prompts);
  }

  // Of the rank that is predicted to take longest. Not where weights stream past, which decide how long it
  // takes.
  void TellMeasured(double seconds) {
    std::vector<PartSeconds> ranks;
    for (size_t rank = 0; rank < by_rank_.size(); ++rank) ranks.push_back(PartsOf(rank));
    const EmbeddedPoolCapacity& pool = runs_.pool.capacity;
    if (pool.weights.mode != WeightMode::kResident) return;
    if (!TellsOfSpeed(ranks, pool.speed.lone_rank_speedup > 1)) return;
    const auto longest =
        std::max_element(ranks.begin(), ranks.end(), [](const PartSeconds& left, const PartSeconds& right) {
          return left.products + left.attention < right.products + right.attention;
        });
    const RankStats& stats = outputs_[static_cast<size_t>(longest - ranks.begin())]->stats;
    runs_.on_measured({.parts = *longest}, MeasuredSecondsOf(seconds, {&stats, 1}));
  }

  // Of the prompt whose logits are row `k` of its rank's.
  absl::StatusOr<PrefillResult> ResultOf(Prompt& prompt, const std::vector<float>& logits, size_t k,
                                         double seconds) {
    const auto& [request, planned, rank, observer] = prompt.given;
    const auto vocab = static_cast<ptrdiff_t>(runs_.model().vocab);
    const double part = static_cast<double>(prompt.ids.size()) / static_cast<double>(tokens_);
    const auto own = logits.begin() + static_cast<ptrdiff_t>(k) * vocab;
    PrefillResult result = {.logits = {own, own + vocab},
                            .plan = planned.choice.plan,
                            .cached_tokens = planned.cached_tokens,
                            .prefill_seconds = seconds,
                            .paused_seconds = absl::ToDoubleSeconds(stop_.PausedTime()),
                            .pack_prompts = static_cast<int>(prompts_.size())};
    for (const absl::StatusOr<RankOutput>& output : outputs_) {
      result.ranks.push_back(PartOf(output->stats, part));
      // Which prompt's tokens an expert had is not known: the first one tells of all.
      if (&prompt == &prompts_.front()) {
        result.ranks.back().tokens_per_expert = output->stats.tokens_per_expert;
      }
    }
    const double peak_flops = runs_.pool.peak_flops * place_.ranks() / runs_.ranks();
    RETURN_IF_ERROR(
        SummarisePrefill(runs_.model(), runs_.model_name, peak_flops, request.options.top_k, result));
    result.mfu /= part;  // of the ranks, while they computed it and others
    if (planned.kv != nullptr && request.options.block_names != nullptr) {
      runs_.on_kept(*request.options.block_names, *planned.kv);
    }
    return result;
  }

  const EmbeddedRuns& runs_;
  RunPlaces::Place place_;  // given back after all that follows
  const std::chrono::steady_clock::time_point start_;
  StopToken stop_;
  std::vector<std::vector<size_t>> by_rank_;      // the prompts of each rank
  int64_t tokens_ = 0;                            // computed, of all prompts
  std::vector<std::unique_ptr<Stream>> streams_;  // by rank, as all that follows
  std::vector<std::unique_ptr<Communicator>> communicators_;
  Mutex observers_mu_;
  std::vector<int> ranks_behind_
      ABSL_GUARDED_BY(observers_mu_);  // by layer: with prompts, that have not done it
  std::vector<Prompt> prompts_;
  mutable Mutex mu_;
  CondVar changed_;
  int running_ ABSL_GUARDED_BY(mu_) = 0;  // prompts that have not been stopped
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<absl::StatusOr<RankOutput>> outputs_;
  std::atomic<int> ranks_done_{0};
  std::optional<RankWeights> weights_;
  LocalRanks ranks_;  // threads; last: they use all of the above
};

// A prompt of it.
class PromptOfPack final : public Prefill {
 public:
  PromptOfPack(std::shared_ptr<EmbeddedPack> pack, size_t index) : pack_(std::move(pack)), index_(index) {}
  ~PromptOfPack() override { pack_->Leave(index_); }

  absl::StatusOr<PrefillResult> Wait() override { return pack_->Wait(index_); }
  bool done() const override { return pack_->done(index_); }
  void WaitForAny() override { pack_->WaitForAny(); }
  void Stop() override { pack_->Stop(index_); }
  void Pause() override { pack_->Pause(); }
  void Resume() override { pack_->Resume(); }

 private:
  const std::shared_ptr<EmbeddedPack> pack_;
  const size_t index_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> BeginEmbeddedPack(const EmbeddedRuns& runs,
                                                                        std::vector<PackedPrefill> prompts,
                                                                        RunPlaces::Place place) {
  const size_t count = prompts.size();
  const auto pack = std::make_shared<EmbeddedPack>(runs, std::move(prompts), std::move(place));
  RETURN_IF_ERROR(pack->Begin());
  std::vector<std::unique_ptr<Prefill>> prefills;
  for (size_t i = 0; i < count; ++i) prefills.push_back(std::make_unique<PromptOfPack>(pack, i));
  return prefills;
}

}  // namespace meshfill
