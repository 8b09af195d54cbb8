#include "kernels/paused_time.h"

#include <gtest/gtest.h>

namespace meshfill {
namespace {

TEST(PausedTimeTest, AddsUpItsPauses) {
  const auto at = [](int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); };
  PausedTime time;
  EXPECT_FALSE(time.paused());
  EXPECT_EQ(time.Total(at(9)), absl::ZeroDuration());
  time.Set(true, at(10));
  EXPECT_TRUE(time.paused());
  EXPECT_EQ(time.Current(at(13)), absl::Seconds(3));
  EXPECT_EQ(time.Total(at(13)), absl::Seconds(3));
  EXPECT_FALSE(time.PausedSince(at(10))) << "it was not yet";
  EXPECT_TRUE(time.PausedSince(at(11)));
  time.Set(false, at(14));
  EXPECT_FALSE(time.paused());
  EXPECT_EQ(time.Current(at(20)), absl::ZeroDuration());
  EXPECT_EQ(time.Total(at(20)), absl::Seconds(4));
  EXPECT_FALSE(time.PausedSince(at(30)));
  time.Set(true, at(40));
  EXPECT_EQ(time.Current(at(42)), absl::Seconds(2));
  EXPECT_EQ(time.Total(at(42)), absl::Seconds(6));
  time.Set(true, at(43));
  EXPECT_EQ(time.Total(at(44)), absl::Seconds(8));
}

}  // namespace
}  // namespace meshfill
