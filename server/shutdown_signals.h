// SIGTERM and SIGINT as something to wait for; the others that people send, as a word in passing.
#ifndef MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_
#define MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_

#include <algorithm>
#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"
#include "server/observe/log.h"

namespace meshfill {

// Make it before any other thread: threads inherit that the signals are blocked, so that they stay pending
// for Wait. SIGHUP, SIGUSR1 and SIGUSR2 end nothing: neither a closed terminal nor `systemctl reload` nor
// somebody's script that asks other servers to open their logs anew costs a prefill. They stay blocked to the
// process' end: one that comes while it leaves does not change its exit status.
class ShutdownSignals {
 public:
  ShutdownSignals() {
    sigemptyset(&signals_);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) sigaddset(&signals_, signal);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  }
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
      if (signal > 0) {
        Log(absl::StrCat("SIG", sigabbrev_np(signal),
                         " changes nothing: the configuration is read at start, ",
                         "certificates and tokens as they change"));
      }
      if (left == absl::ZeroDuration()) return false;
    }
  }

 private:
  sigset_t signals_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_SHUTDOWN_SIGNALS_H_
