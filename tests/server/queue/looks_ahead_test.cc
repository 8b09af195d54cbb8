#include "server/queue/looks_ahead.h"

#include <gtest/gtest.h>

#include <limits>

namespace meshfill {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int LooksIn(double all_seconds, double holds_seconds) {
  const LooksAhead looks(all_seconds);
  int count = 0;
  for (double seconds = 0; seconds < all_seconds; seconds = looks.Next(seconds, holds_seconds)) ++count;
  return count;
}

// Each ranks all that wait: a queue of thousands may not ask for thousands of looks.
TEST(LooksAhead, LooksAreFewHoweverMuchIsAhead) {
  for (const double all_seconds : {0.0, 1.0, 100.0, 1e4, 1e6}) {
    EXPECT_LE(LooksIn(all_seconds, kInfinity), 33);
    EXPECT_LE(LooksIn(all_seconds, 0), 400) << "though the turns change at every moment";
  }
}

TEST(LooksAhead, LooksWhenTurnsChange) {
  const LooksAhead looks(3200);
  EXPECT_EQ(looks.Next(10, 7), 17);
  EXPECT_EQ(looks.Next(10, 1000), 110);
  EXPECT_EQ(looks.Next(10, 0), looks.Earliest(10));
  EXPECT_LE(looks.Earliest(0), 0.1);
  EXPECT_LE(looks.Earliest(10), 11);
}

}  // namespace
}  // namespace meshfill
