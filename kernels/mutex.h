// Mutual exclusion that clang checks (-Wthread-safety, preset thread-safety): std::mutex and its condition
// variable, thinly wrapped. Not absl::Mutex, because ThreadSanitizer cannot see into Debian's build of it.
//
//     Mutex mu_;
//     CondVar changed_;
//     int count_ ABSL_GUARDED_BY(mu_) = 0;
//
//     const MutexLock lock(mu_);
//     while (count_ == 0) changed_.Wait(mu_);  // a loop, not a predicate: clang checks no lambda's locks
#ifndef MESHFILL_KERNELS_MUTEX_H_
#define MESHFILL_KERNELS_MUTEX_H_

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"

namespace meshfill {

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mu_.unlock(); }
  // Tells clang that the caller's caller holds it, where that cannot be written down (callbacks).
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}

 private:
  friend class CondVar;
  std::mutex mu_;
};

// Holds a mutex to the end of its scope, but between Unlock and Lock.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() {
    if (held_) mu_.Unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Unlock() ABSL_UNLOCK_FUNCTION() {
    held_ = false;
    mu_.Unlock();
  }
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    mu_.Lock();
    held_ = true;
  }

 private:
  Mutex& mu_;
  bool held_ = true;
};

// Waits may end early, for no reason: the caller looks again.
class CondVar {
 public:
  void Wait(Mutex& mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // Waits until `deadline` of the monotonic clock at the latest. False: it has passed.
  bool WaitUntil(Mutex& mu, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    constexpr absl::Duration kLongest = absl::Hours(24 * 365);  // far from where the clock's count ends
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    const absl::Time until = std::min(deadline, MonotonicNow() + kLongest);
    const bool in_time = changed_.wait_until(lock, ToSteadyTime(until)) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  bool WaitFor(Mutex& mu, absl::Duration at_most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return WaitUntil(mu, MonotonicNow() + at_most);
  }
  void NotifyOne() { changed_.notify_one(); }
  void NotifyAll() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_MUTEX_H_
