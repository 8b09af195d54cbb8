// Waiting for what other threads do.
#ifndef MESHFILL_TESTS_SERVER_EVENTUALLY_H_
#define MESHFILL_TESTS_SERVER_EVENTUALLY_H_

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"

namespace meshfill {

// True as soon as the condition holds; false after 30 s.
inline bool Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
  while (!condition()) {
    if (MonotonicNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_EVENTUALLY_H_
