// SIGTERM and SIGINT as something to wait for; SIGHUP as a word in passing.
#ifndef MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_
#define MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_

#include <algorithm>
#include <csignal>
#include <functional>
#include <utility>

#include "absl/time/time.h"
#include "kernels/monotonic_time.h"

namespace meshfill {

// What a process says of a SIGHUP that asks for nothing.
constexpr char kNothingToReload[] =
    "SIGHUP changes nothing: the configuration is read at start, certificates and tokens as they change";

// Make it before any other thread: threads inherit that the signals are blocked, so that they stay pending
// for Wait. A SIGHUP ends nothing: neither a closed terminal nor `systemctl reload` costs a prefill.
class ShutdownSignals {
 public:
  // `on_hangup` is called for a SIGHUP, within Wait.
  explicit ShutdownSignals(std::function<void()> on_hangup) : on_hangup_(std::move(on_hangup)) {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals_, &old_mask_);
  }
  ~ShutdownSignals() { pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr); }
  ShutdownSignals(const ShutdownSignals&) = delete;
  ShutdownSignals& operator=(const ShutdownSignals&) = delete;

  // True where SIGTERM or SIGINT comes, or has come, before the timeout.
  bool Wait(absl::Duration timeout) {
    const absl::Time deadline = MonotonicNow() + timeout;
    while (true) {
      const absl::Duration left = std::max(deadline - MonotonicNow(), absl::ZeroDuration());
      const timespec time = absl::ToTimespec(left);
      const int signal = sigtimedwait(&signals_, nullptr, &time);
      if (signal == SIGTERM || signal == SIGINT) return true;
      if (signal == SIGHUP) on_hangup_();
      if (left == absl::ZeroDuration()) return false;
    }
  }

 private:
  const std::function<void()> on_hangup_;
  sigset_t signals_;
  sigset_t old_mask_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_
