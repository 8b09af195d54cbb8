// Whether two tensors agree up to rounding.
#ifndef MESHFILL_TESTS_ENGINE_CLOSE_H_
#define MESHFILL_TESTS_ENGINE_CLOSE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dtype.h"

namespace meshfill {

// `tolerance`: relative to the largest magnitude of `expected`.
inline void ExpectClose(const std::vector<float>& actual, const std::vector<float>& expected,
                        double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double largest = 0, worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(std::isfinite(actual[i])) << what << ": element " << i << " is " << actual[i];
    largest = std::max(largest, std::abs(double{expected[i]}));
    worst = std::max(worst, std::abs(double{actual[i]} - expected[i]));
  }
  EXPECT_LE(worst, tolerance * largest) << what;
}

// Elements of f32 or bf16.
inline std::vector<float> AsFloats(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> floats(bytes.size() / DTypeBytes(dtype));
  for (size_t i = 0; i < floats.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&floats[i], &bytes[i * sizeof(float)], sizeof(float));
    } else {
      BFloat16 half;
      std::memcpy(&half, &bytes[i * sizeof(half)], sizeof(half));
      floats[i] = half.ToFloat();
    }
  }
  return floats;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_CLOSE_H_
