// How long something has stood still, by the clock of who asks. Not thread-safe.
#ifndef MESHFILL_KERNELS_PAUSED_TIME_H_
#define MESHFILL_KERNELS_PAUSED_TIME_H_

#include "absl/time/time.h"

namespace meshfill {

class PausedTime {
 public:
  bool paused() const { return paused_; }
  void Set(bool paused, absl::Time now) {
    if (paused_) total_ += now - since_;
    paused_ = paused;
    since_ = now;
  }
  // How long the present pause has lasted; zero while not paused.
  absl::Duration Current(absl::Time now) const { return paused_ ? now - since_ : absl::ZeroDuration(); }
  // How long it has been paused up to `now`, all pauses together.
  absl::Duration Total(absl::Time now) const { return paused_ ? total_ + (now - since_) : total_; }
  // Whether it stands still, and has all the time since then.
  bool PausedSince(absl::Time time) const { return paused_ && since_ < time; }

 private:
  bool paused_ = false;
  absl::Time since_;  // when `paused_` last changed
  absl::Duration total_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_PAUSED_TIME_H_
