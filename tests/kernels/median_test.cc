#include "kernels/median.h"

#include <gtest/gtest.h>

namespace meshfill {
namespace {

TEST(MedianTest, IsTheMiddleOrTheMeanOfTheMiddleTwo) {
  EXPECT_EQ(Median({5}), 5);
  EXPECT_EQ(Median({9, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 100, 2}), 3);
}

}  // namespace
}  // namespace meshfill
