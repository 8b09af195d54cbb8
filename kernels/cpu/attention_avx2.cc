// The attention kernel for f32 and bf16 inputs on 8-lane vectors. Compiled for AVX2 and FMA.
#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_strip.h"
#include "kernels/cpu/attention_vectors.h"

namespace meshfill {

const AttentionKernel& Avx2AttentionKernel(DType dtype) {
  using Target = F32Target<8, 2>;
  static constexpr AttentionKernel kF32 = MakeAttentionKernel<Target, float>();
  static constexpr AttentionKernel kBf16 = MakeAttentionKernel<Target, Bf16Bits>();
  return dtype == DType::kF32 ? kF32 : kBf16;
}

}  // namespace meshfill
