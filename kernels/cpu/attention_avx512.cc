// The attention kernel for f32 and bf16 inputs on AVX-512 vectors. Compiled for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_strip.h"
#include "kernels/cpu/attention_vectors.h"

namespace meshfill {

const AttentionKernel& Avx512AttentionKernel(DType dtype) {
  using Target = F32Target<16, 4>;
  static constexpr AttentionKernel kF32 = MakeAttentionKernel<Target, float>();
  static constexpr AttentionKernel kBf16 = MakeAttentionKernel<Target, Bf16Bits>();
  return dtype == DType::kF32 ? kF32 : kBf16;
}

}  // namespace meshfill
