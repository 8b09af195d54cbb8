#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/divisor.h"
#include "tests/kernels/random_draws.h"

namespace meshfill {
namespace {

constexpr uint32_t kLargest = std::numeric_limits<uint32_t>::max();

// The product's error grows with n, and shows first where n or n + 1 is a multiple: if the largest such n are
// right, all are.
void ExpectDividesAtTheLimits(uint32_t value) {
  const Divisor divisor(value);
  const uint32_t largest_multiple = kLargest - kLargest % value;
  for (const uint32_t n : {kLargest, largest_multiple, largest_multiple - 1, largest_multiple - value, value,
                           value - 1, uint32_t{1} << 31, uint32_t{0}}) {
    ASSERT_EQ(divisor.Quotient(n), n / value) << n << " / " << value;
    ASSERT_EQ(divisor.Remainder(n), n % value) << n << " mod " << value;
  }
}

TEST(CudaDivisorTest, SmallDivisorsAreRightAtTheLimits) {
  for (uint32_t value = 1; value <= 1 << 17; ++value) {
    ExpectDividesAtTheLimits(value);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(CudaDivisorTest, DivisorsAroundPowersOfTwoAreRightAtTheLimits) {
  for (int power = 3; power <= 32; ++power) {
    for (int64_t offset = -5; offset <= 5; ++offset) {
      const int64_t value = (int64_t{1} << power) + offset;
      if (value > kLargest) continue;
      ExpectDividesAtTheLimits(static_cast<uint32_t>(value));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(CudaDivisorTest, RandomNumbersAreDivided) {
  const uint32_t seed = TestSeed();
  SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed));
  std::mt19937 random(seed);
  for (int draw = 0; draw < 200'000; ++draw) {
    const uint32_t value = static_cast<uint32_t>(random()) >> random() % 32 | 1u << random() % 32;
    const uint32_t n = static_cast<uint32_t>(random()) >> random() % 32;
    const Divisor divisor(value);
    ASSERT_EQ(divisor.Quotient(n), n / value) << n << " / " << value;
    ASSERT_EQ(divisor.Remainder(n), n % value) << n << " mod " << value;
    ExpectDividesAtTheLimits(value);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace meshfill
