// The watch over leases by itself, over a source whose count may take long.
#include "server/api/kv_streams.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

// Has as many leases as it is told, and keeps who counts them waiting while it is held.
class HeldSource : public KvSource {
 public:
  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest&, const std::string&, int64_t,
                                                 std::function<void()>) override {
    return absl::NotFoundError("no lease is read here");
  }
  absl::Time EndLapsed() override {
    const MutexLock lock(mu_);
    const absl::Time now = MonotonicNow();
    if (now >= lapse_) {
      late_ = now - lapse_;
      lapse_ = absl::InfiniteFuture();
      moved_.NotifyAll();
    }
    return lapse_;
  }
  KvStore::Counts counts() const override {
    MutexLock lock(mu_);
    counting_ = true;
    moved_.NotifyAll();
    while (held_) moved_.Wait(mu_);
    counting_ = false;
    return {.leases = leases_};
  }
  void SetObserver(std::function<void()> changed) override { changed_ = std::move(changed); }

  void Change(int64_t leases) {
    {
      const MutexLock lock(mu_);
      leases_ = leases;
    }
    changed_();
  }
  // A lease lapses then; how long after that it is ended.
  absl::Duration LapseIn(absl::Duration time) {
    {
      const MutexLock lock(mu_);
      lapse_ = MonotonicNow() + time;
      late_ = absl::InfiniteDuration();
    }
    changed_();
    MutexLock lock(mu_);
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (lapse_ != absl::InfiniteFuture() && MonotonicNow() < deadline) moved_.WaitUntil(mu_, deadline);
    return late_;
  }
  void Hold(bool held) {
    const MutexLock lock(mu_);
    held_ = held;
    moved_.NotifyAll();
  }
  bool WaitUntilCounting() const {
    MutexLock lock(mu_);
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (!counting_ && MonotonicNow() < deadline) moved_.WaitUntil(mu_, deadline);
    return counting_;
  }

 private:
  std::function<void()> changed_;
  mutable Mutex mu_;
  mutable CondVar moved_;
  mutable bool counting_ ABSL_GUARDED_BY(mu_) = false;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  int64_t leases_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time lapse_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  absl::Duration late_ ABSL_GUARDED_BY(mu_) = absl::InfiniteDuration();
};

TEST(KvStreamsTest, ADrainWaitsForTheCountOfTheNewestChange) {
  HeldSource source;
  KvStreams streams(source, {}, nullptr);
  EXPECT_TRUE(streams.WaitUntilNoLease(MonotonicNow() + kPatience));
  source.Hold(true);
  for (int change = 0; change < 2; ++change) {  // the second comes while the first is counted
    source.Change(0);
    EXPECT_TRUE(source.WaitUntilCounting());
    const absl::Time deadline = MonotonicNow() + absl::Milliseconds(50);
    EXPECT_FALSE(streams.WaitUntilNoLease(deadline));
    EXPECT_GE(MonotonicNow(), deadline);
  }
  source.Hold(false);
  EXPECT_TRUE(streams.WaitUntilNoLease(MonotonicNow() + kPatience));
}

TEST(KvStreamsTest, ALeaseIsWaitedForAsSoonAsItIsGiven) {
  HeldSource source;
  KvStreams streams(source, {}, nullptr);
  EXPECT_TRUE(streams.WaitUntilNoLease(MonotonicNow() + kPatience));
  for (int i = 0; i < 100; ++i) {
    source.Change(1);
    ASSERT_FALSE(streams.WaitUntilNoLease(MonotonicNow())) << i;
    source.Change(0);
    ASSERT_TRUE(streams.WaitUntilNoLease(MonotonicNow() + kPatience)) << i;
  }
}

// Of attempts in which the machine may stand still, the best counts.
TEST(KvStreamsTest, WhatLapsesEndsAtOnce) {
  HeldSource source;
  KvStreams streams(source, {}, nullptr);
  absl::Duration late = absl::InfiniteDuration();
  for (int attempt = 0; attempt < 5 && late > absl::Milliseconds(300); ++attempt) {
    late = std::min(late, source.LapseIn(absl::Milliseconds(20)));
  }
  EXPECT_LT(late, absl::Milliseconds(300));
}

}  // namespace
}  // namespace meshfill
