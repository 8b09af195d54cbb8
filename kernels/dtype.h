// Element types of tensors, and the 16-bit floats that C++20 lacks.
#ifndef MESHFILL_KERNELS_DTYPE_H_
#define MESHFILL_KERNELS_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace meshfill {

enum class DType { kF32, kBf16, kF16 };

constexpr size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kBf16:
    case DType::kF16:
      return 2;
  }
  return 0;  // no value of the enum: nothing that is allocated by it is ever large enough to use
}

// "f32", "bf16", "f16": the names of the command line and of the config.
constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
  }
  return "?";
}

// bfloat16: the upper half of an IEEE binary32.
struct BFloat16 {
  uint16_t bits;

  static constexpr BFloat16 FromFloat(float value) {  // round to nearest even; NaN stays a (quiet) NaN
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
  constexpr float ToFloat() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(BFloat16) == 2);

// IEEE binary16 to binary32, exact (subnormals, infinities and NaN included).
constexpr float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_DTYPE_H_
