// The attention kernel for bf16 inputs on AVX512_BF16. Compiled for AVX-512 F, BW, DQ, VL and BF16.
#include <immintrin.h>

#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_strip.h"
#include "kernels/cpu/attention_vectors.h"

namespace meshfill {
namespace {

struct Avx512Bf16 : Vectors<16> {
  static constexpr int kWordElements = 2;
  static constexpr int kTileVectors = 4;

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

const AttentionKernel& Avx512Bf16AttentionKernel() {
  static constexpr AttentionKernel kKernel = MakeAttentionKernel<Avx512Bf16, Bf16Bits>();
  return kKernel;
}

}  // namespace meshfill
