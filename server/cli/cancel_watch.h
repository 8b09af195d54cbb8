// Ends a command's work early: on Ctrl-C (or SIGTERM), or when its deadline passes.
#ifndef MESHFILL_SERVER_CLI_CANCEL_WATCH_H_
#define MESHFILL_SERVER_CLI_CANCEL_WATCH_H_

#include <csignal>
#include <functional>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"

namespace meshfill {

// The signal that cancelled the work of which `status` tells; 0: none did.
int SignalOf(const absl::Status& status);

// Make it before the threads whose work it ends: they must inherit that SIGINT and SIGTERM are blocked, so
// that this watch alone receives them. A second signal ends the process at once. One at a time in a process.
class CancelWatch {
 public:
  // Calls `cancel` once, from a thread of its own, when the first signal comes or `deadline` passes.
  CancelWatch(absl::Time deadline, std::function<void()> cancel);
  ~CancelWatch();
  CancelWatch(const CancelWatch&) = delete;
  CancelWatch& operator=(const CancelWatch&) = delete;

  // OK while nothing has happened; then DEADLINE_EXCEEDED, or CANCELLED ("cancelled") by a signal.
  absl::Status status() const;

 private:
  void Watch();
  void Cancel(absl::Status reason);

  const absl::Time deadline_;
  const std::function<void()> cancel_;
  sigset_t old_mask_;
  int signals_ = -1;  // signalfd of SIGINT and SIGTERM
  int quit_ = -1;     // eventfd that ends the thread
  mutable Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_CANCEL_WATCH_H_
