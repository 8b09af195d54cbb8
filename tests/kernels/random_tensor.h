// Tensors for tests of kernels: random or poisoned, with a guard behind the last element, and how to compare
// them.
#ifndef MESHFILL_TESTS_KERNELS_RANDOM_TENSOR_H_
#define MESHFILL_TESTS_KERNELS_RANDOM_TENSOR_H_

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/dtype.h"

namespace meshfill {

// Fresh for each run of a test, or MESHFILL_SEED. Print it with SCOPED_TRACE, so that a failure replays.
inline uint64_t TestSeed() {
  const char* seed = std::getenv("MESHFILL_SEED");
  return seed != nullptr ? std::strtoull(seed, nullptr, 10) : std::random_device()();
}

// Uniform in [low, high].
inline int64_t Draw(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

class Tensor {
 public:
  // Poisoned: every element is NaN.
  Tensor(DType dtype, int64_t count)
      : dtype_(dtype), count_(count), bytes_(count * DTypeBytes(dtype) + kGuardBytes, kPoison) {}

  static Tensor Normal(std::mt19937_64& random, DType dtype, int64_t count, float scale = 1) {
    Tensor tensor(dtype, count);
    std::normal_distribution<float> normal(0, scale);
    for (int64_t i = 0; i < count; ++i) tensor.Set(i, normal(random));
    return tensor;
  }

  DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  template <typename T = void>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data());
  }
  template <typename T = void>
  const T* data() const {
    return reinterpret_cast<const T*>(bytes_.data());
  }

  float At(int64_t i) const {
    switch (dtype_) {
      case DType::kF32:
        return data<float>()[i];
      case DType::kBf16:
        return data<BFloat16>()[i].ToFloat();
      case DType::kF16:
        return HalfToFloat(data<uint16_t>()[i]);
      case DType::kF8E4M3:
        return Fp8ToFloat(data<uint8_t>()[i]);
      case DType::kF4E2M1:
        break;  // not of a size of whole bytes
    }
    return NAN;
  }
  // f16 and FP8 take normal numbers only, and cut off the bits that they lack.
  void Set(int64_t i, float value) {
    switch (dtype_) {
      case DType::kF32:
        data<float>()[i] = value;
        break;
      case DType::kBf16:
        data<BFloat16>()[i] = BFloat16::FromFloat(value);
        break;
      case DType::kF16: {
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        const int exponent = static_cast<int>((bits >> 23) & 0xff) - 112;
        const uint32_t magnitude =
            exponent < 1 ? 0 : (static_cast<uint32_t>(exponent) << 10) | ((bits >> 13) & 0x3ff);
        data<uint16_t>()[i] = static_cast<uint16_t>(((bits >> 16) & 0x8000) | magnitude);
        break;
      }
      case DType::kF8E4M3: {
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        const int exponent = static_cast<int>((bits >> 23) & 0xff) - 120;
        const uint32_t magnitude =
            exponent < 1 ? 0 : (static_cast<uint32_t>(exponent) << 3) | ((bits >> 20) & 7);
        data<uint8_t>()[i] = static_cast<uint8_t>(((bits >> 24) & 0x80) | magnitude);
        break;
      }
      case DType::kF4E2M1:
        break;
    }
  }

  bool GuardIntact() const {
    for (size_t i = bytes_.size() - kGuardBytes; i < bytes_.size(); ++i) {
      if (bytes_[i] != kPoison) return false;
    }
    return true;
  }
  bool SameBits(const Tensor& other) const { return dtype_ == other.dtype_ && bytes_ == other.bytes_; }

 private:
  static constexpr size_t kGuardBytes = 64;
  static constexpr uint8_t kPoison = 0xff;

  DType dtype_;
  int64_t count_;
  std::vector<uint8_t> bytes_;
};

// Every element within `tolerance` (absolute, plus the same relative) of the expected one. bf16 may besides
// differ by one rounding, but seldom: only where the exact value is next to the middle between two numbers.
inline void ExpectClose(const Tensor& got, const Tensor& expected, double tolerance) {
  ASSERT_EQ(got.dtype(), expected.dtype());
  ASSERT_EQ(got.count(), expected.count());
  EXPECT_TRUE(got.GuardIntact()) << "wrote past the end";
  const double rounding = got.dtype() == DType::kBf16 ? 0x1p-7 : 0;
  int64_t rounded_otherwise = 0;
  for (int64_t i = 0; i < got.count(); ++i) {
    const double value = got.At(i), reference = expected.At(i);
    if (value == reference) continue;  // infinities too
    ++rounded_otherwise;
    const double allowed = tolerance + (tolerance + rounding) * std::abs(reference);
    ASSERT_LE(std::abs(value - reference), allowed)
        << "at " << i << " of " << got.count() << ": " << value << " for " << reference;
  }
  if (rounding > 0) {
    EXPECT_LE(rounded_otherwise, 8 + got.count() / 50) << "rounded more than once?";
  }
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_RANDOM_TENSOR_H_
