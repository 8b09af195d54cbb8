// A test of random draws, each with a seed that its failure names.
#ifndef MESHFILL_TESTS_KERNELS_RANDOM_DRAWS_H_
#define MESHFILL_TESTS_KERNELS_RANDOM_DRAWS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>

#include "tests/kernels/random_tensor.h"

namespace meshfill {

class RandomDraws : public testing::Test {
 protected:
  // Calls body() for some draws, with a new random_.
  void ForRandomDraws(int draws, const std::function<void()>& body) {
    const uint64_t seed = TestSeed();
    for (int draw = 0; draw < draws; ++draw) {
      SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
      random_.seed(seed + draw);
      body();
      if (HasFatalFailure()) return;
    }
  }
  int64_t Draw(int64_t low, int64_t high) { return meshfill::Draw(random_, low, high); }

  std::mt19937_64 random_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_RANDOM_DRAWS_H_
