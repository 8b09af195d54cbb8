#include "server/pool/pool_run.h"

#include <utility>

#include "engine/prefill_summary.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {

// The observer, until the prefill goes. Thread-safe.
class PoolEngine::Run::Listener {
 public:
  explicit Listener(PrefillObserver* observer) : observer_(observer) {}
  void Leave() {
    const MutexLock lock(mu_);
    observer_ = nullptr;
  }
  void Tell(const Leader::LayersDone& done, bool anew) {
    const MutexLock lock(mu_);
    if (observer_ != nullptr && anew) observer_->OnBegunAnew();
    if (observer_ != nullptr) observer_->OnLayerDone(done.layers, done.of);
  }

 private:
  Mutex mu_;
  PrefillObserver* observer_ ABSL_GUARDED_BY(mu_);
};

PoolEngine::Run::Run(PoolEngine& engine, const PrefillRequest& request, PrefillObserver* observer)
    : engine_(engine), request_(request), listener_(std::make_shared<Listener>(observer)) {}

PoolEngine::Run::~Run() {
  Stop();
  listener_->Leave();
  const MutexLock lock(engine_.mu_);
  engine_.runs_.erase(ticket_);
}

Leader::Request PoolEngine::Run::ForLeader() const {
  return {.id = request_.options.request_id, .tokens = request_.tokens, .options = request_.options};
}

void PoolEngine::Run::Attach(Leader::Ticket ticket, uint64_t pack) {
  engine_.mu_.AssertHeld();
  ticket_ = ticket;
  pack_ = pack;
  engine_.runs_[ticket] = this;
}

void PoolEngine::Run::TellOfPass(const PartSeconds& predicted) {
  engine_.mu_.AssertHeld();
  of_pass_ = predicted;
}

absl::Status PoolEngine::Run::Submit() {
  engine_.mu_.AssertHeld();
  const absl::Time since = MonotonicNow();
  Attach(engine_.leader_.Submit(ForLeader(), since), /*pack=*/0);
  engine_.DoActions();
  while (engine_.leader_.Undecided(ticket_, since, MonotonicNow())) {
    engine_.changed_.WaitFor(engine_.mu_, kTick);
  }
  if (answer_.has_value() && absl::IsResourceExhausted(answer_->status())) return answer_->status();
  if (!engine_.leader_.CrowdedOut(ticket_)) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      "the workers have no room for the prefill beside those that live; wait for the end of one");
}

void PoolEngine::Run::OnAnswer(absl::StatusOr<Leader::Result> answer) {
  engine_.mu_.AssertHeld();
  answer_ = std::move(answer);
}

void PoolEngine::Run::OnLayersDone(const Leader::LayersDone& done) {
  engine_.mu_.AssertHeld();
  layers_done_ = done;
}

bool PoolEngine::Run::answered() const {
  engine_.mu_.AssertHeld();
  return answer_.has_value();
}

uint64_t PoolEngine::Run::pack() const {
  engine_.mu_.AssertHeld();
  return pack_;
}

// The leader answers at once and reads the tokens no more.
void PoolEngine::Run::Stop() {
  const MutexLock lock(engine_.mu_);
  engine_.leader_.CancelRequest(ticket_, absl::CancelledError("the prefill was stopped"), MonotonicNow());
  engine_.DoActions();
}

void PoolEngine::Run::SetPaused(bool paused) {
  const MutexLock lock(engine_.mu_);
  engine_.leader_.SetPaused(ticket_, paused, MonotonicNow());
  engine_.DoActions();
}

uint64_t PoolEngine::Run::place() const {
  const MutexLock lock(engine_.mu_);
  return engine_.leader_.PlaceOf(ticket_);
}

absl::StatusOr<PrefillResult> PoolEngine::Run::Wait() {
  TellUntilAnswered(/*any=*/false);
  absl::StatusOr<Leader::Result> answer = absl::UnknownError("");
  {
    const MutexLock lock(engine_.mu_);
    answer = *std::move(answer_);
  }
  ASSIGN_OR_RETURN(Leader::Result run, std::move(answer));
  PrefillResult result{.logits = std::move(run.logits), .top = {}, .plan = std::move(run.plan)};
  result.pieces = run.pieces;
  result.piece_tokens = run.piece_tokens;
  result.cached_tokens = run.cached_tokens;
  result.ranks = std::move(run.ranks);
  result.pool_ranks = std::move(run.pool_ranks);
  result.prefill_seconds = run.seconds;
  RETURN_IF_ERROR(SummarisePrefill(engine_.model_.shape, engine_.model_name(), run.peak_flops,
                                   request_.options.top_k, result));
  result.mfu /= run.pack_share;  // of the rank, while it computed it and others
  result.pack_prompts = run.pack_prompts;
  // A run that measured the links was planned without knowing them: it says nothing of the predictions to
  // come.
  if (!run.probed) Learn(result, run.pack_share);
  result.lost_seconds = run.lost_seconds;
  result.paused_seconds = run.paused_seconds;
  result.attempts = run.attempts;
  return result;
}

void PoolEngine::Run::Learn(const PrefillResult& result, double pack_share) {
  MeasuredSeconds measured = MeasuredSecondsOf(result.prefill_seconds, result.ranks);
  const MutexLock lock(engine_.mu_);
  if (result.pack_prompts == 1) return engine_.Learn(result.plan.predicted, measured);
  measured.attention /= pack_share;  // all of it in the pass
  measured.comm_wait /= pack_share;
  if (of_pass_.has_value()) engine_.Learn({.parts = *of_pass_}, measured);
}

void PoolEngine::Run::AddNews(std::vector<News>& news) {
  engine_.mu_.AssertHeld();
  const Leader::LayersDone& done = layers_done_;
  const bool anew = done.attempt > told_.attempt;
  if (done.layers == 0 || !(anew || done.layers != told_.layers || done.of != told_.of)) return;
  news.push_back({listener_, done, anew});
  told_ = done;
}

std::vector<PoolEngine::Run*> PoolEngine::Run::OfPack() {
  engine_.mu_.AssertHeld();
  std::vector<Run*> runs = {this};
  for (const auto& [ticket, run] : engine_.runs_) {
    if (run != this && pack_ != 0 && run->pack() == pack_) runs.push_back(run);
  }
  return runs;
}

bool PoolEngine::Run::done() const {
  const MutexLock lock(engine_.mu_);
  return answer_.has_value();
}

void PoolEngine::Run::WaitForAny() { TellUntilAnswered(/*any=*/true); }

void PoolEngine::Run::TellUntilAnswered(bool any) {
  MutexLock lock(engine_.mu_);
  while (true) {
    std::vector<News> news;
    bool answered = answer_.has_value();
    for (Run* const run : OfPack()) {
      run->AddNews(news);
      answered = answered || (any && run->answered());
    }
    if (news.empty() && answered) return;
    if (news.empty()) {
      engine_.changed_.Wait(engine_.mu_);
      continue;
    }
    lock.Unlock();
    for (const News& each : news) each.listener->Tell(each.done, each.anew);
    lock.Lock();
  }
}

}  // namespace meshfill
