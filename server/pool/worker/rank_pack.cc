#include "server/pool/worker/rank_pack.h"

#include <cstddef>
#include <iterator>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/comm/in_process.h"
#include "engine/run/local_ranks.h"
#include "engine/run/rank_weights.h"
#include "kernels/return_if_error.h"

namespace meshfill {

absl::StatusOr<RankOutput> RankPack::Compute(const RankPrompt& prompt,
                                             std::function<void(int layer)> on_layer_done) {
  Part part{.prompt = prompt, .on_layer_done = std::move(on_layer_done), .output = RankOutput()};
  MutexLock lock(mu_);
  if (!reason_.ok()) return reason_;
  if (computes_) return absl::InternalError("more runs share the pass than the leader said");
  parts_.push_back(&part);
  // The leader ends what makes no progress.
  if (std::ssize(parts_) < runs_) {
    while (!over_ && (computes_ || reason_.ok())) over_changed_.Wait(mu_);
    return over_ ? std::move(part.output) : absl::StatusOr<RankOutput>(reason_);
  }
  computes_ = true;
  std::vector<RankPrompt> prompts;
  for (const Part* each : parts_) prompts.push_back(each->prompt);
  lock.Unlock();
  const absl::StatusOr<RankOutput> pass = ComputePass(prompts);
  lock.Lock();
  Share(pass);
  over_ = true;
  over_changed_.NotifyAll();
  return std::move(part.output);
}

absl::StatusOr<RankOutput> RankPack::ComputePass(const std::vector<RankPrompt>& prompts) {
  const auto at = static_cast<size_t>(rank_);
  Device& device = *pool_.devices[at];
  ASSIGN_OR_RETURN(std::unique_ptr<Stream> of_device, device.NewStream(&stop_));
  auto counting = std::make_unique<CountingStream>(std::move(of_device));
  Stream* const stream = counting.get();
  std::vector<Part*> parts;
  {
    const MutexLock lock(mu_);
    stream_ = std::move(counting);
    parts = parts_;
  }
  const auto communicators = MakeInProcessCommunicators({&stream, 1}, &stop_);
  const RankWeights weights(std::span(pool_.models).subspan(at, 1), pool_.peers.get(), {true}, &stop_);
  const absl::Duration paused_before = stop_.PausedTime();
  absl::StatusOr<RankOutput> output = RunRank({.prompts = prompts,
                                               .model = *pool_.models[at],
                                               .weights = weights.feed(0),
                                               .reader = weights.reader(0),
                                               .rank = 0,
                                               .stream = *stream,
                                               .communicator = *communicators.front(),
                                               .wait_timeout = PeerWaitTimeout(prompts.front().plan),
                                               .on_layer_done = [&parts](int layer) {
                                                 for (const Part* part : parts) part->on_layer_done(layer);
                                               }});
  if (output.ok()) {
    output->stats.total_seconds -= absl::ToDoubleSeconds(stop_.PausedTime() - paused_before);
    return output;
  }
  stream->Finish().IgnoreError();  // what is queued uses prompts, and weights
  stream->Mark().IgnoreError();    // fails where the device has: lost() says so from then on
  return output;
}

// What fails with others may go well alone.
void RankPack::Share(const absl::StatusOr<RankOutput>& pass) {
  if (!pass.ok()) {
    const absl::Status status = absl::AbortedError(
        absl::StrCat("the pass that it shares with ", parts_.size() - 1,
                     " other prompts failed: ", reason_.ok() ? pass.status().message() : reason_.message()));
    for (Part* part : parts_) part->output = status;
    return;
  }
  int64_t tokens = 0;
  for (const Part* part : parts_) tokens += std::ssize(part->prompt.ids);
  const size_t vocab = pass->logits.size() / parts_.size();
  for (size_t i = 0; i < parts_.size(); ++i) {
    const double share = static_cast<double>(parts_[i]->prompt.ids.size()) / static_cast<double>(tokens);
    const auto logits = pass->logits.begin() + static_cast<ptrdiff_t>(i * vocab);
    RankOutput& output = parts_[i]->output.value();
    output.stats = PartOf(pass->stats, share);
    output.logits.assign(logits, logits + static_cast<ptrdiff_t>(vocab));
    // Which prompt's tokens an expert had is not known: the first one tells of all.
    if (i == 0) output.stats.tokens_per_expert = pass->stats.tokens_per_expert;
  }
}

void RankPack::Pause(uint64_t run) {
  const MutexLock lock(mu_);
  paused_.insert(run);
  stop_.Pause();
}

void RankPack::Resume(uint64_t run) {
  const MutexLock lock(mu_);
  paused_.erase(run);
  if (paused_.empty()) stop_.Resume();
}

void RankPack::Abort(const absl::Status& reason) {
  const MutexLock lock(mu_);
  if (over_ || !reason_.ok()) return;
  reason_ = reason;
  stop_.Stop();
  over_changed_.NotifyAll();
}

uint64_t RankPack::operations() const {
  const MutexLock lock(mu_);
  return stream_ != nullptr ? stream_->operations() : 0;
}

}  // namespace meshfill
