// Vectors of kLanes 32-bit words, in the compiler's own vector types: one source for SSE2, AVX2 and AVX-512.
//
// Included only by the files that are compiled for one instruction set. All names have internal linkage, so
// that a function compiled for AVX-512 is never linked in place of the same one compiled for an older
// machine.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_VECTORS_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_VECTORS_H_

#include <cstdint>
#include <cstring>

namespace meshfill {
namespace {

template <typename T, int kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};

template <int kVectorLanes>
struct Vectors {
  static constexpr int kLanes = kVectorLanes;
  using Floats = typename VectorOf<float, kLanes>::Type;
  using Ints = typename VectorOf<int32_t, kLanes>::Type;
  using Words = typename VectorOf<uint32_t, kLanes>::Type;
  using Halves = typename VectorOf<uint16_t, kLanes>::Type;

  template <typename Vector>
  static Vector Load(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  template <typename Vector>
  static void Store(void* to, Vector v) {
    std::memcpy(to, &v, sizeof v);
  }

  static Floats Broadcast(float value) { return value - Floats{}; }
  static Words BroadcastWord(uint32_t word) { return word | Words{}; }
  static Floats Max(Floats a, Floats b) { return a > b ? a : b; }
  static Words Widen(Halves halves) { return __builtin_convertvector(halves, Words); }

  static Ints LaneNumbers() {
    Ints lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    return lanes;
  }

  // Lane i of the result is lane lanes[i] of `first`, or of `second` behind it.
#ifdef __clang__  // which shuffles by constants alone, and only analyses this code (preset thread-safety)
  template <typename Vector>
  static Vector Shuffle(Vector first, Vector second, Ints lanes) {
    Vector shuffled;
    for (int i = 0; i < kLanes; ++i) {
      const int lane = lanes[i] % (2 * kLanes);
      shuffled[i] = lane < kLanes ? first[lane] : second[lane - kLanes];
    }
    return shuffled;
  }
  template <typename Vector>
  static Vector Shuffle(Vector v, Ints lanes) {
    return Shuffle(v, v, lanes);
  }
#else
  template <typename Vector>
  static Vector Shuffle(Vector first, Vector second, Ints lanes) {
    return __builtin_shuffle(first, second, lanes);
  }
  template <typename Vector>
  static Vector Shuffle(Vector v, Ints lanes) {
    return __builtin_shuffle(v, lanes);
  }
#endif

  // All lanes hold the result.
  static Floats ReduceMax(Floats v) {
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) v = Max(v, Shuffle(v, LaneNumbers() ^ half));
    return v;
  }
  static Floats ReduceSum(Floats v) {
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) v += Shuffle(v, LaneNumbers() ^ half);
    return v;
  }

  // rows[i][j] ↔ rows[j][i], by log2(kLanes) rounds of perfect shuffles.
  static void Transpose(Words (&rows)[kLanes]) {
    const Ints low = LaneNumbers() / 2 + (LaneNumbers() % 2) * kLanes;
    const Ints high = low + kLanes / 2;
#pragma GCC unroll 4
    for (int round = 1; round < kLanes; round *= 2) {
      Words next[kLanes];
#pragma GCC unroll 8
      for (int i = 0; i < kLanes / 2; ++i) {
        next[2 * i] = Shuffle(rows[i], rows[i + kLanes / 2], low);
        next[2 * i + 1] = Shuffle(rows[i], rows[i + kLanes / 2], high);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
    }
  }

  // 2^x for x ≤ 128. Relative error 9e-8 before rounding; 2^0 is exactly 1; results below 2^−126 are 0, as is
  // 2^−∞.
  static Floats Exp2Degree5(Floats x) {
    const Floats round_to_integer = Broadcast(0x1.8p23f);  // the sum's low bits are the nearest integer
    const Floats shifted = x + round_to_integer;
    const Floats fraction = x - (shifted - round_to_integer);  // in [−½, ½]
    Floats mantissa = 0.00132647143f * fraction + 0.00967151264f;
    mantissa = mantissa * fraction + 0.0555073377f;
    mantissa = mantissa * fraction + 0.240222421f;
    mantissa = mantissa * fraction + 0.693146978f;
    mantissa = mantissa * fraction + 1.0f;
    const Floats result = (Floats)((Words)mantissa + ((Words)shifted << 23));
    return x < -126.0f ? Floats{} : result;
  }
};

}  // namespace
}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_VECTORS_H_
