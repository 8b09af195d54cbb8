#include "engine/run/local_ranks.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {

absl::Duration PeerWaitTimeout(const Plan& plan) {
  return absl::Seconds(60) + 20 * absl::Seconds(plan.predicted.seconds);
}

absl::Status FirstCause(const std::vector<absl::StatusOr<RankOutput>>& outputs) {
  absl::Status cause;
  for (const absl::StatusOr<RankOutput>& output : outputs) {
    if (output.ok()) continue;
    if (cause.ok() || absl::IsCancelled(cause) || absl::IsAborted(cause)) cause = output.status();
  }
  return cause;
}

void LocalRanks::Start(int ranks, Run run, Done done) {
  run_ = std::move(run);
  done_ = std::move(done);
  threads_.reserve(ranks);
  for (int index = 0; index < ranks; ++index) {
    try {
      threads_.emplace_back([this, index] { done_(index, run_(index)); });
    } catch (const std::system_error& error) {
      done_(index, absl::ResourceExhaustedError(
                       absl::StrCat("rank ", index, ": no thread could be started for it (", error.what(),
                                    "); use fewer ranks, or raise the limits of threads and memory")));
    }
  }
}

void LocalRanks::Join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace meshfill
