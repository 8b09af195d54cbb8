// Division by a number that a whole launch shares: the host prepares it, and a thread then multiplies once
// and shifts where the device's own division takes some twenty instructions.
//
// With 2^s ≤ d < 2^(s + 1) and m = ⌊2^(32 + s) / d⌋, one of the two is ⌊n / d⌋ for every n below 2^32
// (Robison, "N-Bit Unsigned Division via N-Bit Multiply-Add", 2005):
//
//     n · (m + 1) / 2^(32 + s)        where (m + 1) · d − 2^(32 + s) ≤ 2^s
//     (n + 1) · m / 2^(32 + s)        where m · d is less than 2^s below
#ifndef MESHFILL_KERNELS_CUDA_DIVISOR_H_
#define MESHFILL_KERNELS_CUDA_DIVISOR_H_

#include <bit>
#include <cstdint>

namespace meshfill {

class Divisor {
 public:
  constexpr Divisor() : Divisor(1) {}
  // value ≥ 1
  constexpr explicit Divisor(uint32_t value) : value_(value), shift_(std::bit_width(value) - 1) {
    const uint64_t power = uint64_t{1} << (32 + shift_);
    const uint64_t below = power / value, rest = power % value;
    if (rest == 0) {  // a power of two: (n + 1) · (2^32 − 1) / 2^32 is n
      multiplier_ = addend_ = 0xffffffff;
    } else if (value - rest <= uint64_t{1} << shift_) {
      multiplier_ = static_cast<uint32_t>(below + 1);
    } else {
      multiplier_ = addend_ = static_cast<uint32_t>(below);
    }
  }

  constexpr uint32_t value() const { return value_; }
  constexpr uint32_t Quotient(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n} * multiplier_ + addend_) >> 32) >> shift_;
  }
  constexpr uint32_t Remainder(uint32_t n) const { return n - Quotient(n) * value_; }

 private:
  uint32_t value_;
  uint32_t multiplier_ = 0;
  uint32_t addend_ = 0;
  uint32_t shift_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_DIVISOR_H_
