#include "kernels/stop_token.h"

#include <atomic>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

// Loops that count their steps until they are stopped.
class Loops {
 public:
  explicit Loops(const StopToken& token) {
    for (int i = 0; i < 3; ++i) {
      threads_.emplace_back([&] {
        while (token.Proceed()) ++steps_;
      });
    }
  }
  ~Loops() {
    for (std::thread& thread : threads_) thread.join();
  }

  bool go_on() const {
    const int64_t before = steps_;
    const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
    while (steps_ < before + 100 && MonotonicNow() < deadline) absl::SleepFor(absl::Microseconds(100));
    return steps_ >= before + 100;
  }
  bool stand_still() const {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
    while (MonotonicNow() < deadline) {
      const int64_t before = steps_;
      absl::SleepFor(absl::Milliseconds(5));
      if (steps_ == before) return true;
    }
    return false;
  }

 private:
  std::atomic<int64_t> steps_{0};
  std::vector<std::thread> threads_;
};

TEST(StopToken, LoopsStandStillUntilItResumes) {
  StopToken token;
  Loops loops(token);
  for (int pause = 0; pause < 3; ++pause) {
    EXPECT_TRUE(loops.go_on());
    token.Pause();
    token.Pause();
    EXPECT_TRUE(loops.stand_still());  // once each has ended the step that it is in
    token.Resume();
  }
  EXPECT_TRUE(loops.go_on());
  token.Stop();
}

TEST(StopToken, StopEndsAPauseForGood) {
  StopToken token;
  Loops loops(token);
  token.Pause();
  token.Stop();
  EXPECT_TRUE(token.stopped());
  token.Pause();
  token.Resume();
  EXPECT_TRUE(token.stopped());
  EXPECT_FALSE(token.Proceed());
}

TEST(StopToken, AddsUpItsPauses) {
  StopToken token;
  EXPECT_EQ(token.PausedTime(), absl::ZeroDuration());
  token.Resume();
  EXPECT_EQ(token.PausedTime(), absl::ZeroDuration());
  absl::Duration least;
  for (int pause = 0; pause < 3; ++pause) {
    token.Pause();
    const absl::Time begin = MonotonicNow();
    absl::SleepFor(absl::Milliseconds(2));
    least += MonotonicNow() - begin;
    EXPECT_GE(token.PausedTime(), least) << "a pause that lasts counts";
    token.Resume();
    const absl::Duration paused = token.PausedTime();
    EXPECT_GE(paused, least);
    absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(token.PausedTime(), paused);
  }
  token.Pause();
  token.Stop();
  const absl::Duration paused = token.PausedTime();
  absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(token.PausedTime(), paused);
}

}  // namespace
}  // namespace meshfill
