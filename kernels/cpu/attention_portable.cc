// The attention kernel for any machine: vectors of four floats, which every architecture has or the compiler
// splits.
#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_strip.h"
#include "kernels/cpu/attention_vectors.h"

namespace meshfill {

const AttentionKernel& PortableAttentionKernel(DType dtype) {
  using Target = F32Target<4, 2>;
  static constexpr AttentionKernel kF32 = MakeAttentionKernel<Target, float>();
  static constexpr AttentionKernel kBf16 = MakeAttentionKernel<Target, Bf16Bits>();
  return dtype == DType::kF32 ? kF32 : kBf16;
}

}  // namespace meshfill
