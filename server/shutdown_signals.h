// SIGTERM and SIGINT as something to wait for.
#ifndef MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_
#define MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_

#include <csignal>

#include "absl/time/time.h"

namespace meshfill {

// Make it before any other thread: threads inherit that the signals are blocked, so that they stay pending
// for Wait.
class ShutdownSignals {
 public:
  ShutdownSignals() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, &old_mask_);
  }
  ~ShutdownSignals() { pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr); }
  ShutdownSignals(const ShutdownSignals&) = delete;
  ShutdownSignals& operator=(const ShutdownSignals&) = delete;

  // True where a signal comes, or has come, before the timeout.
  bool Wait(absl::Duration timeout) {
    const timespec time = absl::ToTimespec(timeout);
    return sigtimedwait(&signals_, nullptr, &time) > 0;
  }

 private:
  sigset_t signals_;
  sigset_t old_mask_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_
