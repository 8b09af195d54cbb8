// What the owner of a run tells its compute loops: to end early, or to stand still while another run has the
// device.
//
// Loops ask between tiles, where they hold nothing that another run needs, so a run that stands still keeps
// its memory and its threads alone, and goes on where it stood: a pause changes no bit of its result. All
// methods may be called from any thread.
#ifndef MESHFILL_KERNELS_STOP_TOKEN_H_
#define MESHFILL_KERNELS_STOP_TOKEN_H_

#include <atomic>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {

class StopToken {
 public:
  // Stops the run for good. It ends a pause.
  void Stop() { Set(State::kStopped); }
  // Pauses the run until Resume. Pause and Resume do nothing where it is stopped, or in that state already.
  void Pause() { Set(State::kPaused); }
  void Resume() { Set(State::kGoing); }

  bool stopped() const { return state_.load(std::memory_order_relaxed) == State::kStopped; }

  // Stands still while the run is paused. False: it is stopped, leave.
  bool Proceed() const {
    const State state = state_.load(std::memory_order_relaxed);
    return state == State::kPaused ? AwaitResume() : state == State::kGoing;
  }

  // The time, and how long it has been paused until then, in all.
  struct Moment {
    absl::Time now;
    absl::Duration paused;
    absl::Time run_time() const { return now - paused; }  // stands still in a pause
  };
  Moment Now() const {
    const MutexLock lock(mu_);
    const absl::Time now = MonotonicNow();
    const bool is_paused = state_.load(std::memory_order_relaxed) == State::kPaused;
    return {now, is_paused ? paused_ + (now - paused_since_) : paused_};
  }
  absl::Duration PausedTime() const { return Now().paused; }

 private:
  enum class State { kGoing, kPaused, kStopped };

  void Set(State next) {
    const MutexLock lock(mu_);
    const State before = state_.load(std::memory_order_relaxed);
    if (before == next || before == State::kStopped) return;
    const absl::Time now = MonotonicNow();
    if (before == State::kPaused) paused_ += now - paused_since_;
    paused_since_ = now;
    state_.store(next, std::memory_order_relaxed);
    changed_.NotifyAll();
  }

  bool AwaitResume() const {
    const MutexLock lock(mu_);
    while (state_.load(std::memory_order_relaxed) == State::kPaused) changed_.Wait(mu_);
    return !stopped();
  }

  std::atomic<State> state_{State::kGoing};  // written under mu_
  mutable Mutex mu_;
  mutable CondVar changed_;
  absl::Time paused_since_ ABSL_GUARDED_BY(mu_);  // while paused: when the pause began
  absl::Duration paused_ ABSL_GUARDED_BY(mu_);    // length of the pauses that have ended
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_STOP_TOKEN_H_
