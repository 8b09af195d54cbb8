// Adds up where a rank's time goes.
#ifndef MESHFILL_ENGINE_SCOPED_TIMER_H_
#define MESHFILL_ENGINE_SCOPED_TIMER_H_

#include <chrono>

namespace meshfill {

// Adds the wall time of its scope to `*seconds`.
class ScopedTimer {
 public:
  explicit ScopedTimer(double* seconds) : seconds_(seconds) {}
  ~ScopedTimer() {
    *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  double* const seconds_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCOPED_TIMER_H_
