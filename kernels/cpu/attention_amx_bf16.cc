// The attention kernel for bf16 inputs on AMX: 32 queries against 32 keys at a time, in tiles of 16 by 16
// sums. Packing and softmax are those of the vectors. Compiled for AVX-512 F, BW, DQ, VL and BF16, and
// AMX-BF16.
#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "kernels/cpu/amx.h"
#include "kernels/cpu/attention_bf16_pairs.h"
#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_strip.h"

namespace meshfill {
namespace {

// A panel is two tiles of keys wide, a strip two tiles of queries high: four tiles of sums, and of each
// operand two, are all eight.
struct AmxBf16 : Bf16Pairs {
  static constexpr int kStripRows = 32;
  static constexpr int kTileVectors = 2;
  // Scores, probabilities, queries and a panel of keys are 40 KiB then, and stay in an L1 of 48 KiB.
  static constexpr int kBlockKeys = 128;
};

constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // 64 bytes

// The thread's tiles, until the end of the scope.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kWholeTiles); }
  ~Tiles() { _tile_release(); }
};

// sums[32, kVectors·16] ← (or += where kAdds) a[32, depth words] · b[depth words, kVectors·16]. Strides are
// in words. Tiles 0 to 3 are the sums, 4 and 5 of `a`, 6 and 7 of `b`.
template <int kVectors, bool kAdds>
__attribute__((always_inline)) inline void MultiplyTiles(const uint32_t* a, int a_stride, const uint32_t* b,
                                                         int b_stride, int depth, float* sums,
                                                         int sums_stride) {
  constexpr int kWordBytes = sizeof(uint32_t);
  asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
  float* const lower = sums + kTileRows * sums_stride;
  if constexpr (kAdds) {
    _tile_loadd(0, sums, sums_stride * kWordBytes);
    _tile_loadd(1, lower, sums_stride * kWordBytes);
    if constexpr (kVectors == 2) {
      _tile_loadd(2, sums + kTileWords, sums_stride * kWordBytes);
      _tile_loadd(3, lower + kTileWords, sums_stride * kWordBytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < depth; i += kTileWords, a += kTileWords, b += kTileWords * b_stride) {
    _tile_loadd(4, a, a_stride * kWordBytes);
    _tile_loadd(6, b, b_stride * kWordBytes);
    _tile_loadd(5, a + kTileRows * a_stride, a_stride * kWordBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kVectors == 2) _tile_loadd(7, b + kTileWords, b_stride * kWordBytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kVectors == 2) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sums_stride * kWordBytes);
  _tile_stored(1, lower, sums_stride * kWordBytes);
  if constexpr (kVectors == 2) {
    _tile_stored(2, sums + kTileWords, sums_stride * kWordBytes);
    _tile_stored(3, lower + kTileWords, sums_stride * kWordBytes);
  }
}

// Hides what a row does not see, and finds the maximum of the rest.
void MaskAndFindMax(const StripBlock& block, int begin, int end, StripScores<AmxBf16>& strip) {
  using Floats = AmxBf16::Floats;
  constexpr int kLanes = AmxBf16::kLanes;
  const Floats hidden = AmxBf16::Broadcast(-std::numeric_limits<float>::infinity());
  for (int r = 0; r < AmxBf16::kStripRows; ++r) {
    Floats max = hidden;
    for (int key = begin; key < end; key += kLanes) {
      Floats score = AmxBf16::Load<Floats>(&strip.scores[r][key]);
      if (key < block.row_begin[r] || key + kLanes > block.row_end[r]) {
        const AmxBf16::Ints number = AmxBf16::LaneNumbers() + key;
        score = number >= block.row_begin[r] ? score : hidden;
        score = number < block.row_end[r] ? score : hidden;
        AmxBf16::Store(&strip.scores[r][key], score);
      }
      max = AmxBf16::Max(max, score);
    }
    strip.max[r] = max;
  }
}

// Where the maximum has stayed, as it soon does, the state stays too.
void DecayOutput(const StripBlock& block, const StripScores<AmxBf16>& strip) {
  using Floats = AmxBf16::Floats;
  const int padded_dim = DivideRoundingUp(block.head_dim, AmxBf16::kLanes) * AmxBf16::kLanes;
  for (int r = 0; r < AmxBf16::kStripRows; ++r) {
    if (strip.decay[r][0] == 1.0f) continue;
    float* const row = block.output + r * padded_dim;
    for (int d = 0; d < padded_dim; d += AmxBf16::kLanes) {
      AmxBf16::Store(row + d, AmxBf16::Load<Floats>(row + d) * strip.decay[r]);
    }
  }
}

void AttendStripInTiles(const StripBlock& block) {
  constexpr int kLanes = AmxBf16::kLanes;
  constexpr int kPanelKeys = kLanes * AmxBf16::kTileVectors;
  constexpr int kLast = AmxBf16::kStripRows - 1;
  const int begin = block.row_begin[0] / kPanelKeys * kPanelKeys;
  const int end = DivideRoundingUp(block.row_end[kLast], kPanelKeys) * kPanelKeys;
  const int query_words = DivideRoundingUp(block.head_dim, kLanes * AmxBf16::kWordElements) * kLanes;
  const int padded_dim = DivideRoundingUp(block.head_dim, kLanes) * kLanes;
  const Tiles tiles;
  StripScores<AmxBf16> strip;
  for (int key = begin; key < end; key += kPanelKeys) {
    MultiplyTiles<2, false>(block.queries, query_words, block.keys + int64_t{key} * query_words, kPanelKeys,
                            query_words, &strip.scores[0][key], AmxBf16::kBlockKeys);
  }
  MaskAndFindMax(block, begin, end, strip);
  UpdateMax(block, strip);
  Exponentiate(block, begin, end, strip);
  DecayOutput(block, strip);
  const int first_word = begin / AmxBf16::kWordElements;
  const int words = (end - begin) / AmxBf16::kWordElements;
  const int block_words = block.block_keys / AmxBf16::kWordElements;
  ForEachColumnPanel<AmxBf16>(block.head_dim, [&](int first, int vectors) {
    const auto add = vectors == 2 ? MultiplyTiles<2, true> : MultiplyTiles<1, true>;
    add(&strip.probabilities[0][first_word], AmxBf16::kBlockKeys / AmxBf16::kWordElements,
        block.values + int64_t{first} * kLanes * block_words + int64_t{first_word} * vectors * kLanes,
        vectors * kLanes, words, block.output + first * kLanes, padded_dim);
  });
}

}  // namespace

const AttentionKernel& AmxBf16AttentionKernel() {
  static constexpr AttentionKernel kKernel = MakeAttentionKernel<AmxBf16, Bf16Bits>(AttendStripInTiles);
  return kKernel;
}

}  // namespace meshfill
