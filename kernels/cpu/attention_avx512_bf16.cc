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

  static Floats MultiplyAdd(Floats acc, Words a, Words b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
  }
  static Floats Exp2(Floats x) { return Exp2Degree3(x); }
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
