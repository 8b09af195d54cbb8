// Element types of tensors, and the floats of 16 and 8 bits that C++20 lacks.
#ifndef MESHFILL_KERNELS_DTYPE_H_
#define MESHFILL_KERNELS_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace meshfill {

// kF8E4M3 and kF4E2M1: of weights alone, with scales beside them (kernels/device.h).
enum class DType { kF32, kBf16, kF16, kF8E4M3, kF4E2M1 };

// Bytes of one element; 0 for kF4E2M1, two elements of which share a byte (ElementsBytes).
constexpr size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kBf16:
    case DType::kF16:
      return 2;
    case DType::kF8E4M3:
      return 1;
    case DType::kF4E2M1:
      return 0;
  }
  return 0;  // no value of the enum: nothing that is allocated by it is ever large enough to use
}

// Bytes of `elements` elements side by side. For kF4E2M1 the count is even.
constexpr int64_t ElementsBytes(DType dtype, int64_t elements) {
  return dtype == DType::kF4E2M1 ? elements / 2 : elements * static_cast<int64_t>(DTypeBytes(dtype));
}

// "f32", "bf16", "f16", "fp8", "mxfp4": the names of the command line and of the config.
constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kF8E4M3:
      return "fp8";
    case DType::kF4E2M1:
      return "mxfp4";
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

// E4M3 as models ship it (OCP's, without infinities): 4 bits of exponent, 3 of mantissa; exact.
constexpr float Fp8ToFloat(uint8_t fp8) {
  const uint32_t sign = static_cast<uint32_t>(fp8 & 0x80u) << 24;
  const uint32_t magnitude = fp8 & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {  // subnormal
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// E2M1 in the low half of a byte (OCP Microscaling Formats 1.0): a sign, 2 bits of exponent, 1 of mantissa;
// exact.
constexpr float Fp4ToFloat(uint8_t fp4) {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float magnitude = kMagnitudes[fp4 & 7];
  return (fp4 & 8) != 0 ? -magnitude : magnitude;
}

// E8M0, the scale of a block in MXFP4: 2^(bits − 127); 255 is NaN.
constexpr float E8M0ToFloat(uint8_t bits) {
  if (bits == 255) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(bits == 0 ? 0x00400000u : static_cast<uint32_t>(bits) << 23);
}
inline constexpr int64_t kMxBlock = 32;  // elements of a row that share such a scale

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_DTYPE_H_
