// Vectors of bf16 pairs on AVX512_BF16: what its kernel and that of AMX have in common.
//
// Included only by the files that are compiled for one instruction set; see attention_vectors.h.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_BF16_PAIRS_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_BF16_PAIRS_H_

#include <immintrin.h>

#include "kernels/cpu/attention_vectors.h"

namespace meshfill {
namespace {

struct Bf16Pairs : Vectors<16> {
  static constexpr int kWordElements = 2;

  static Words Widen(Halves halves) { return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)halves); }
  static Floats MultiplyAdd(Floats acc, Words a, Words b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
  }
  // 2^x from the fraction x − ⌊x⌋. Relative error 9e-5, a twentieth of bf16's half unit in the last place;
  // 2^0 is exactly 1, 2^−∞ is 0.
  static Floats Exp2(Floats x) {
    const Floats fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const Floats mantissa =
        ((0.0770664132f * fraction + 0.227645678f) * fraction + 0.695116632f) * fraction + 1.0f;
    return _mm512_maskz_scalef_ps(0xffff, mantissa, x);
  }
  // Sums what multiplies V: the rounded probabilities, by a product with ones.
  static Floats StoreProbabilities(uint32_t* to, Floats a, Floats b, Floats sum) {
    const __m512bh packed = _mm512_cvtne2ps_pbh(b, a);
    Store(to, packed);
    return _mm512_dpbf16_ps(sum, packed, (__m512bh)_mm512_set1_epi16(0x3f80));
  }
};

}  // namespace
}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_BF16_PAIRS_H_
