// The deadline of a wait in a run that may stand still meanwhile (kernels/stop_token.h): the run's pauses are
// no part of the wait.
#ifndef MESHFILL_KERNELS_RUN_DEADLINE_H_
#define MESHFILL_KERNELS_RUN_DEADLINE_H_

#include "absl/time/time.h"
#include "kernels/stop_token.h"

namespace meshfill {

class RunDeadline {
 public:
  // `run` may be null: it is never paused.
  RunDeadline(const StopToken* run, absl::Time deadline)
      : run_(run), deadline_(deadline), paused_before_(PausedTime()) {}

  // The deadline, moved by the run's pauses since the wait began. A later pause moves it again: who reaches
  // it asks anew.
  absl::Time Now() const { return deadline_ + (PausedTime() - paused_before_); }

 private:
  absl::Duration PausedTime() const { return run_ == nullptr ? absl::ZeroDuration() : run_->PausedTime(); }

  const StopToken* const run_;
  const absl::Time deadline_;
  const absl::Duration paused_before_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_RUN_DEADLINE_H_
