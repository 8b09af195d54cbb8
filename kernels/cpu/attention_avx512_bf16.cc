// The attention kernel for bf16 inputs on AVX512_BF16. Compiled for AVX-512 F, BW, DQ, VL and BF16.
#include "kernels/cpu/attention_bf16_pairs.h"
#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_strip.h"

namespace meshfill {
namespace {

struct Avx512Bf16 : Bf16Pairs {
  static constexpr int kStripRows = kVectorStripRows;
  static constexpr int kBlockKeys = kVectorBlockKeys;
  static constexpr int kTaskRows = kVectorTaskRows;
  static constexpr int kTileVectors = 4;
};

}  // namespace

const AttentionKernel& Avx512Bf16AttentionKernel() {
  static constexpr AttentionKernel kKernel = MakeAttentionKernel<Avx512Bf16, Bf16Bits>();
  return kKernel;
}

}  // namespace meshfill
