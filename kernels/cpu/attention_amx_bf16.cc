// The attention kernel for bf16 inputs on AMX: 32 queries against 32 keys at a time, in tiles of 16 by 16
// sums. Packing is that of the vectors. Compiled for AVX-512 F, BW, DQ, VL and BF16, and AMX-BF16.
//
// Keys and values pass from L2 once for each strip, which keeps the tiles waiting. So all else stays in L1:
//
//     for 256 keys                          32 queries                     8 KiB
//         for 128 keys   scores ← Q Kᵀ      32 × 128 floats               16 KiB
//                        max, mask, 2^x     probabilities, bf16 pairs     16 KiB
//         output += P V                     from L2, and back: once for 256 keys
//
// A row's scores are measured from a shift, which rises only where they exceed it by more than kSlack: the
// output seldom has to be scaled, and never between the two halves but for that.
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
  // Keys that are packed at a time: they stay in L2.
  static constexpr int kBlockKeys = 512;
  static constexpr int kTaskRows = 1024;  // every processor with AMX has 2 MiB of L2

  // Lane r of the result is what `reduce` makes of all lanes of rows[r]. In each round a vector has the lanes
  // of twice as many rows, of each half as many.
  template <typename Reduce>
  static Floats ReduceRows(const Floats (&rows)[kLanes], Reduce reduce) {
    Floats halves[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) halves[r] = rows[r];
    const Ints lane = LaneNumbers() % (kLanes / 2), vector = LaneNumbers() / (kLanes / 2);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
      const Ints low = lane / half * (2 * half) + lane % half + vector * kLanes, high = low + half;
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) {
        const Floats first = halves[2 * i], second = halves[2 * i + 1];
        halves[i] = reduce(Shuffle(first, second, low), Shuffle(first, second, high));
      }
    }
    return halves[0];
  }
};

using Floats = AmxBf16::Floats;
using Ints = AmxBf16::Ints;
constexpr int kLanes = AmxBf16::kLanes;
constexpr int kRows = AmxBf16::kStripRows;
constexpr int kPanelKeys = kLanes * AmxBf16::kTileVectors;
constexpr int kScoredKeys = 128;
constexpr int kAddedKeys = 256;
constexpr float kSlack = 8;  // in exponents of 2
constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // 64 bytes

// The thread's tiles, until the end of the scope.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kWholeTiles); }
  ~Tiles() { _tile_release(); }
};

// GCC's tile loads do not say that they read memory: what is written before is written here.
void WriteAll() { asm volatile("" ::: "memory"); }

// Two tiles high or deep; the stride is in words.
struct Operand {
  const uint32_t* words;
  int stride;
};

// sums[32, kVectors·16] ← (or += where kAdds) a[32, depth words] · b[depth words, kVectors·16]. Tiles 0 to 3
// are the sums, 4 and 5 of `a`, 6 and 7 of `b`, which comes from L2 and is to leave L1 to the others.
template <int kVectors, bool kAdds>
__attribute__((always_inline)) inline void MultiplyTiles(Operand a, Operand b, int depth, float* sums,
                                                         int sums_stride) {
  constexpr int kWordBytes = sizeof(uint32_t);
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
  for (int i = 0; i < depth; i += kTileWords) {
    _tile_loadd(4, a.words, a.stride * kWordBytes);
    _tile_stream_loadd(6, b.words, b.stride * kWordBytes);
    _tile_loadd(5, a.words + kTileRows * a.stride, a.stride * kWordBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kVectors == 2) _tile_stream_loadd(7, b.words + kTileWords, b.stride * kWordBytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kVectors == 2) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    a.words += kTileWords;
    b.words += kTileWords * b.stride;
  }
  _tile_stored(0, sums, sums_stride * kWordBytes);
  _tile_stored(1, lower, sums_stride * kWordBytes);
  if constexpr (kVectors == 2) {
    _tile_stored(2, sums + kTileWords, sums_stride * kWordBytes);
    _tile_stored(3, lower + kTileWords, sums_stride * kWordBytes);
  }
}

struct KeySpan {
  int begin, end;  // within the block, in whole panels
};

// One strip on its way through a block.
class StripPass {
 public:
  explicit StripPass(const StripBlock& block) : block_(block) {}

  void Run() {
    const KeySpan all = {block_.row_begin[0] / kPanelKeys * kPanelKeys,
                         DivideRoundingUp(block_.row_end[kRows - 1], kPanelKeys) * kPanelKeys};
    for (group_ = all.begin / kAddedKeys * kAddedKeys; group_ < all.end; group_ += kAddedKeys) {
      const KeySpan group = Within(all, group_, kAddedKeys);
      int added = group.begin;
      for (int first = group.begin / kScoredKeys * kScoredKeys; first < group.end; first += kScoredKeys) {
        const KeySpan keys = Within(group, first, kScoredKeys);
        Score(keys);
        for (int r = 0; r < kRows; ++r) MaskAndFindMax(keys, r);
        if (ShiftsRise()) {
          if (added < keys.begin) AddValues({added, keys.begin});
          added = keys.begin;
          Decay();
        }
        for (int r = 0; r < kRows; ++r) Exponentiate(keys, r);
        AddSums();
      }
      AddValues({added, group.end});
    }
  }

 private:
  static KeySpan Within(const KeySpan& keys, int first, int count) {
    return {first < keys.begin ? keys.begin : first, Min(first + count, keys.end)};
  }

  // The scores' number of a key is that within its kScoredKeys.
  static float* ScoreOf(float* row, int key) { return row + key % kScoredKeys; }
  uint32_t* ProbabilitiesOf(int r, int key) {
    return probabilities_[r] + (key - group_) / AmxBf16::kWordElements;
  }

  // Body(key) for the first key of each panel. All spans but a prompt's last ones are whole: no branch in
  // there can be foreseen wrongly.
  template <typename Body>
  __attribute__((always_inline)) static void ForEachPanel(const KeySpan& keys, Body body) {
    if (keys.end - keys.begin == kScoredKeys) {
#pragma GCC unroll 4
      for (int panel = 0; panel < kScoredKeys / kPanelKeys; ++panel) body(keys.begin + panel * kPanelKeys);
    } else {
      for (int key = keys.begin; key < keys.end; key += kPanelKeys) body(key);
    }
  }

  // Q Kᵀ.
  void Score(const KeySpan& keys) {
    const int query_words = DivideRoundingUp(block_.head_dim, kLanes * AmxBf16::kWordElements) * kLanes;
    WriteAll();
    for (int key = keys.begin; key < keys.end; key += kPanelKeys) {
      MultiplyTiles<2, false>({block_.queries, query_words},
                              {block_.keys + int64_t{key} * query_words, kPanelKeys}, query_words,
                              ScoreOf(scores_[0], key), kScoredKeys);
    }
  }

  // output += P V.
  void AddValues(const KeySpan& keys) {
    const int padded_dim = DivideRoundingUp(block_.head_dim, kLanes) * kLanes;
    const int first_word = keys.begin / AmxBf16::kWordElements;
    const int words = (keys.end - keys.begin) / AmxBf16::kWordElements;
    const int block_words = block_.block_keys / AmxBf16::kWordElements;
    const Operand probabilities = {ProbabilitiesOf(0, keys.begin), kAddedKeys / AmxBf16::kWordElements};
    WriteAll();
    ForEachColumnPanel<AmxBf16>(block_.head_dim, [&](int first, int vectors) {
      const int stride = vectors * kLanes;
      const Operand values = {
          block_.values + int64_t{first} * kLanes * block_words + int64_t{first_word} * stride, stride};
      const auto add = vectors == 2 ? MultiplyTiles<2, true> : MultiplyTiles<1, true>;
      add(probabilities, values, words, block_.output + first * kLanes, padded_dim);
    });
  }

  // Hides what a row does not see, and finds the maximum of the rest.
  __attribute__((always_inline)) void MaskAndFindMax(const KeySpan& keys, int r) {
    const Floats hidden = AmxBf16::Broadcast(-std::numeric_limits<float>::infinity());
    Floats max[2] = {hidden, hidden};
    if (block_.row_begin[r] <= keys.begin && keys.end <= block_.row_end[r]) {
      ForEachPanel(
          keys, [&](int key) __attribute__((always_inline)) {
            const float* const scores = ScoreOf(scores_[r], key);
            max[0] = AmxBf16::Max(max[0], AmxBf16::Load<Floats>(scores));
            max[1] = AmxBf16::Max(max[1], AmxBf16::Load<Floats>(scores + kLanes));
          });
    } else {
      ForEachPanel(
          keys, [&](int key) __attribute__((always_inline)) {
            float* const scores = ScoreOf(scores_[r], key);
            for (int half = 0; half < 2; ++half) {
              const Ints number = AmxBf16::LaneNumbers() + (key + half * kLanes);
              Floats score = AmxBf16::Load<Floats>(scores + half * kLanes);
              score = number >= block_.row_begin[r] ? score : hidden;
              score = number < block_.row_end[r] ? score : hidden;
              AmxBf16::Store(scores + half * kLanes, score);
              max[half] = AmxBf16::Max(max[half], score);
            }
          });
    }
    rows_[r / kLanes][r % kLanes] = AmxBf16::Max(max[0], max[1]);
  }

  // What scores are measured from, given their maxima. Whether the state so far must be scaled for that.
  bool ShiftsRise() {
    const Floats hidden = AmxBf16::Broadcast(-std::numeric_limits<float>::infinity());
    bool rise = false;
    for (int half = 0; half < 2; ++half) {
      const int first = half * kLanes;
      const Floats old_max = AmxBf16::Load<Floats>(block_.max + first);
      const Floats of_keys = AmxBf16::ReduceRows(rows_[half], AmxBf16::Max) * block_.scale_log2e;
      const Floats new_max = of_keys > old_max + kSlack ? of_keys : old_max;
      // A row that has seen nothing keeps −∞, but is shifted by 0: −∞ − (−∞) is NaN.
      const Floats shift = new_max > hidden ? new_max : Floats{};
      const Floats decay = AmxBf16::Exp2Degree5(old_max - shift);
      AmxBf16::Store(shift_ + first, shift);
      AmxBf16::Store(decay_ + first, decay);
      AmxBf16::Store(block_.max + first, new_max);
      const Ints changed = decay != 1.0f;
      for (int r = 0; r < kLanes; ++r) rise = rise || changed[r] != 0;
    }
    return rise;
  }

  void Decay() {
    const int padded_dim = DivideRoundingUp(block_.head_dim, kLanes) * kLanes;
    for (int r = 0; r < kRows; ++r) {
      if (decay_[r] == 1.0f) continue;
      block_.sum[r] *= decay_[r];
      const Floats decay = AmxBf16::Broadcast(decay_[r]);
      float* const row = block_.output + r * padded_dim;
      for (int d = 0; d < padded_dim; d += kLanes) {
        AmxBf16::Store(row + d, AmxBf16::Load<Floats>(row + d) * decay);
      }
    }
  }

  __attribute__((always_inline)) void Exponentiate(const KeySpan& keys, int r) {
    const Floats scale = AmxBf16::Broadcast(block_.scale_log2e);
    const Floats shift = AmxBf16::Broadcast(shift_[r]);
    Floats sum = {};
    ForEachPanel(
        keys, [&](int key) __attribute__((always_inline)) {
          const float* const scores = ScoreOf(scores_[r], key);
          const Floats first = AmxBf16::Load<Floats>(scores), second = AmxBf16::Load<Floats>(scores + kLanes);
          sum = AmxBf16::StoreProbabilities(ProbabilitiesOf(r, key), AmxBf16::Exp2(first * scale - shift),
                                            AmxBf16::Exp2(second * scale - shift), sum);
        });
    rows_[r / kLanes][r % kLanes] = sum;
  }

  void AddSums() {
    for (int half = 0; half < 2; ++half) {
      float* const sum = block_.sum + half * kLanes;
      AmxBf16::Store(sum, AmxBf16::Load<Floats>(sum) +
                              AmxBf16::ReduceRows(rows_[half], [](Floats a, Floats b) { return a + b; }));
    }
  }

  const StripBlock& block_;
  int group_ = 0;  // first of the keys that are added at once
  alignas(64) float scores_[kRows][kScoredKeys];
  alignas(64) uint32_t probabilities_[kRows][kAddedKeys / AmxBf16::kWordElements];
  alignas(64) float shift_[kRows];  // what scores are measured from, in exponents of 2
  alignas(64) float decay_[kRows];  // what the state so far is multiplied by
  Floats rows_[2][kLanes];          // each row's maximum, then its sum, lane by lane
};

void AttendInTiles(const StripBlock* strips, int count) {
  const Tiles tiles;  // which takes a twentieth of a strip's time
  for (int i = 0; i < count; ++i) StripPass(strips[i]).Run();
}

}  // namespace

const AttentionKernel& AmxBf16AttentionKernel() {
  static constexpr AttentionKernel kKernel = MakeAttentionKernel<AmxBf16, Bf16Bits>(AttendInTiles);
  return kKernel;
}

}  // namespace meshfill
