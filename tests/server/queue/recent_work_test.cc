#include "server/queue/recent_work.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

// Prompts of a length have a part of the time, for long: what is twice as long and more leaves it to them.
TEST(RecentWork, IsTheShareOfWhatIsHalfAsLong) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 200; ++draw) {
    const double work = std::exp2(std::uniform_real_distribution<double>(-18, 17)(random));
    const double share = Draw(random, 5, 70) / 100.0, step = Draw(random, 1, 40) / 10.0;
    const int priority = Draw(random, -2, 2);
    RecentWork recent;
    double now = 0;
    while (now < 1200) recent.Add(priority, work, share * step, At(now += step));
    EXPECT_NEAR(recent.ShareBefore(priority, 2.4 * work, At(now)), share, 0.03 * share + 0.01);
    EXPECT_EQ(recent.ShareBefore(priority, 1.99 * work, At(now)), 0);
    if (priority > -2) {
      EXPECT_GT(recent.ShareBefore(priority - 1, 0.01 * work, At(now)), 0) << "a class below";
    }
    if (priority < 2) {
      EXPECT_EQ(recent.ShareBefore(priority + 1, 100 * work, At(now)), 0) << "a class above";
    }
  }
}

TEST(RecentWork, AddsWhatIsShorter) {
  RecentWork recent;
  recent.Add(0, 0.1, 12, At(1));
  recent.Add(0, 1, 24, At(1));
  recent.Add(1, 1000, 6, At(1));
  EXPECT_NEAR(recent.ShareBefore(0, 0.1, At(1)), 0.05, 1e-9);
  EXPECT_NEAR(recent.ShareBefore(0, 1, At(1)), 0.15, 1e-9);
  EXPECT_NEAR(recent.ShareBefore(0, 10, At(1)), 0.35, 1e-9);
}

TEST(RecentWork, ForgetsInMinutes) {
  RecentWork recent;
  recent.Add(0, 1, 60, At(10));
  EXPECT_NEAR(recent.ShareBefore(0, 10, At(10)), 0.5, 1e-9);
  EXPECT_NEAR(recent.ShareBefore(0, 10, At(130)), 0.5 * std::exp(-1), 1e-9);
  recent.Add(0, 1, 60, At(130));
  EXPECT_NEAR(recent.ShareBefore(0, 10, At(130)), 0.5 * (1 + std::exp(-1)), 1e-9);
  EXPECT_LT(recent.ShareBefore(0, 10, At(86400)), 1e-9);
}

TEST(RecentWork, LeavesAQuarter) {
  RecentWork recent;
  recent.Add(0, 1, 1000, At(10));
  EXPECT_EQ(recent.ShareBefore(0, 10, At(10)), 0.75);
}

TEST(RecentWork, TakesAnyLength) {
  RecentWork recent;
  recent.Add(0, 0, 12, At(1));
  recent.Add(0, 1e300, 12, At(1));
  EXPECT_NEAR(recent.ShareBefore(0, 1, At(1)), 0.1, 1e-9);
  EXPECT_NEAR(recent.ShareBefore(0, 1e301, At(1)), 0.2, 1e-9);
  EXPECT_EQ(recent.ShareBefore(0, 0, At(1)), 0);
}

}  // namespace
}  // namespace meshfill
