// The time of every deadline, timeout and duration: it runs forward at an even pace, also where somebody sets
// the machine's clock.
#ifndef MESHFILL_KERNELS_MONOTONIC_TIME_H_
#define MESHFILL_KERNELS_MONOTONIC_TIME_H_

#include <chrono>

#include "absl/time/time.h"

namespace meshfill {

// No time of day: only differences between two of them mean something, and only in this process.
inline absl::Time MonotonicNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// The moment for a condition variable to wait until. InfinitePast and InfiniteFuture are the clock's own
// ends.
inline std::chrono::steady_clock::time_point ToSteadyTime(absl::Time monotonic) {
  return std::chrono::steady_clock::time_point(absl::ToChronoNanoseconds(monotonic - absl::UnixEpoch()));
}

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_MONOTONIC_TIME_H_
