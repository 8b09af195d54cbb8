#include "server/cli/cancel_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {
namespace {

constexpr char kSignalPayload[] = "meshfill.signal";

// For poll(2): milliseconds until `deadline`, rounded up; −1: forever.
int PollMilliseconds(absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) return -1;
  const int64_t left =
      absl::ToInt64Milliseconds(absl::Ceil(deadline - MonotonicNow(), absl::Milliseconds(1)));
  return static_cast<int>(std::clamp<int64_t>(left, 0, std::numeric_limits<int>::max()));
}

}  // namespace

int SignalOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kSignalPayload);
  int signal = 0;
  return payload.has_value() && absl::SimpleAtoi(std::string(*payload), &signal) ? signal : 0;
}

CancelWatch::CancelWatch(absl::Time deadline, std::function<void()> cancel)
    : deadline_(deadline), cancel_(std::move(cancel)) {
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGINT);
  sigaddset(&mask, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &mask, &old_mask_);
  signals_ = signalfd(-1, &mask, SFD_CLOEXEC);
  quit_ = eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { Watch(); });
}

CancelWatch::~CancelWatch() {
  eventfd_write(quit_, 1);
  thread_.join();
  close(signals_);
  close(quit_);
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

absl::Status CancelWatch::status() const {
  const MutexLock lock(mu_);
  return status_;
}

void CancelWatch::Watch() {
  int signals_seen = 0;
  while (true) {
    std::array<pollfd, 2> wanted = {{{quit_, POLLIN, 0}, {signals_, POLLIN, 0}}};
    const bool deadline_pending = status().ok();
    const int ready = poll(wanted.data(), wanted.size(), deadline_pending ? PollMilliseconds(deadline_) : -1);
    if (ready < 0) continue;  // EINTR
    if (wanted[0].revents != 0) return;
    if (wanted[1].revents != 0) {
      signalfd_siginfo info;
      if (read(signals_, &info, sizeof(info)) < 0) continue;
      const auto signal = static_cast<int>(info.ssi_signo);
      if (++signals_seen > 1) _exit(128 + signal);  // the exit status that shells give
      absl::Status cancelled = absl::CancelledError("cancelled");
      cancelled.SetPayload(kSignalPayload, absl::Cord(absl::StrCat(signal)));
      Cancel(std::move(cancelled));
    } else if (deadline_pending && MonotonicNow() >= deadline_) {
      Cancel(
          absl::DeadlineExceededError("the deadline passed before the prefill was done; allow more seconds"));
    }
  }
}

void CancelWatch::Cancel(absl::Status reason) {
  {
    const MutexLock lock(mu_);
    if (!status_.ok()) return;
    status_ = std::move(reason);
  }
  cancel_();
}

}  // namespace meshfill
