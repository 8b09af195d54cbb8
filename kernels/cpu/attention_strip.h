// The attention kernel of a target, as templates over its vectors and its multiply-add (FlashAttention-2,
// §3.1).
//
// A Target derives from Vectors<lanes> and says:
//   kWordElements                    1 (f32) or 2 (bf16 pairs)
//   kTileVectors                     vectors across a register tile
//   MultiplyAdd(acc, a, b)           acc + a·b on words
//   Exp2(x)                          2^x, as accurate as the probabilities' precision needs
//   StoreProbabilities(to, a, b)     packs two vectors of probabilities, adds what it packed to a running sum
//
// Included only by the files that are compiled for one instruction set; see attention_vectors.h.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_STRIP_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_STRIP_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_vectors.h"

namespace meshfill {
namespace {

// bf16 inputs, as their bits.
using Bf16Bits = uint16_t;

constexpr int DivideRoundingUp(int a, int b) { return (a + b - 1) / b; }

// ---- Packing.

// The vector of words that starts at element `begin` of a row; zeros beyond the row's end.
template <typename Target, typename Source>
typename Target::Words LoadRow(const Source* row, int begin, int head_dim) {
  using Words = typename Target::Words;
  constexpr int kElements = Target::kLanes * Target::kWordElements;
  Source padded[kElements];
  const Source* from = row + begin;
  if (begin + kElements > head_dim) {
    std::memset(padded, 0, sizeof padded);
    if (begin < head_dim) std::memcpy(padded, from, (head_dim - begin) * sizeof(Source));
    from = padded;
  }
  if constexpr (kElements * sizeof(Source) == sizeof(Words)) {
    return Target::template Load<Words>(from);
  } else {
    return Target::Widen(Target::template Load<typename Target::Halves>(from)) << 16;
  }
}

// packed: [kStripRows, QueryWords], words of the head dimension.
template <typename Target, typename Source>
void PackQueries(const void* rows, int count, int head_dim, uint32_t* packed) {
  constexpr int kElements = Target::kLanes * Target::kWordElements;
  const Source* source = static_cast<const Source*>(rows);
  for (int row = 0; row < kStripRows; ++row) {
    for (int d = 0; d < head_dim; d += kElements, packed += Target::kLanes) {
      Target::Store(packed, row < count ? LoadRow<Target>(source + int64_t{row} * head_dim, d, head_dim)
                                        : typename Target::Words{});
    }
  }
}

// packed: [panels, QueryWords, panel keys]. Keys are packed up to the end of their panel.
template <typename Target, typename Source>
void PackKeys(const void* rows, int count, int head_dim, int block_keys, uint32_t* packed) {
  constexpr int kLanes = Target::kLanes;
  constexpr int kPanelKeys = kLanes * Target::kTileVectors;
  constexpr int kElements = kLanes * Target::kWordElements;
  const Source* source = static_cast<const Source*>(rows);
  const int query_words = DivideRoundingUp(head_dim, kElements) * kLanes;
  const int packed_keys = DivideRoundingUp(count, kPanelKeys) * kPanelKeys;
  for (int key = 0; key < packed_keys; key += kLanes) {
    uint32_t* to = packed + int64_t{key / kPanelKeys} * query_words * kPanelKeys + key % kPanelKeys;
    for (int d = 0; d < head_dim; d += kElements) {
      typename Target::Words words[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        words[i] = key + i < count ? LoadRow<Target>(source + int64_t{key + i} * head_dim, d, head_dim)
                                   : typename Target::Words{};
      }
      Target::Transpose(words);
      for (int i = 0; i < kLanes; ++i, to += kPanelKeys) Target::Store(to, words[i]);
    }
  }
}

// The head dimension in column panels of at most kTileVectors vectors, as even as they can be: 80 is 48 + 32.
template <typename Target, typename Body>
inline void ForEachColumnPanel(int head_dim, Body body) {
  const int vectors = DivideRoundingUp(head_dim, Target::kLanes);
  const int panels = DivideRoundingUp(vectors, Target::kTileVectors);
  for (int panel = 0; panel < panels; ++panel) {
    const int begin = panel * vectors / panels;
    body(begin, (panel + 1) * vectors / panels - begin);
  }
}

// The words of a vector of columns from one row (f32) or from a row and the next (bf16).
template <typename Target, typename Source>
typename Target::Words LoadColumns(const Source* source, int key, int count, int begin, int head_dim) {
  using Words = typename Target::Words;
  const Source* row = source + int64_t{key} * head_dim;
  if constexpr (Target::kWordElements == 1) {
    return key < count ? LoadRow<Target>(row, begin, head_dim) : Words{};
  } else {
    using Halves = typename Target::Halves;
    Halves pair[2] = {};
    for (int i = 0; i < 2 && key + i < count; ++i, row += head_dim) {
      if (begin + Target::kLanes <= head_dim) {
        pair[i] = Target::template Load<Halves>(row + begin);
      } else {
        std::memcpy(&pair[i], row + begin, (head_dim - begin) * sizeof(Source));
      }
    }
    return Target::Widen(pair[0]) | Target::Widen(pair[1]) << 16;
  }
}

// packed: [column panels, words of the keys, panel columns]. Keys are packed up to the end of their key
// panel.
template <typename Target, typename Source>
void PackValues(const void* rows, int count, int head_dim, int block_keys, uint32_t* packed) {
  constexpr int kLanes = Target::kLanes;
  constexpr int kPanelKeys = kLanes * Target::kTileVectors;
  const Source* source = static_cast<const Source*>(rows);
  const int packed_keys = DivideRoundingUp(count, kPanelKeys) * kPanelKeys;
  const int block_words = block_keys / Target::kWordElements;
  ForEachColumnPanel<Target>(head_dim, [&](int first, int vectors) {
    uint32_t* to = packed + int64_t{first} * kLanes * block_words;
    for (int key = 0; key < packed_keys; key += Target::kWordElements) {
      for (int v = first; v < first + vectors; ++v, to += kLanes) {
        Target::Store(to, LoadColumns<Target>(source, key, count, v * kLanes, head_dim));
      }
    }
  });
}

// ---- The register tile.

// tile[r][v] += Σ_depth a[r][depth] · b[depth][v]: kStripRows broadcasts and kVectors loads feed their
// product's multiply-adds.
template <typename Target, int kVectors>
__attribute__((always_inline)) inline void MultiplyTile(
    const uint32_t* a, int a_stride, const uint32_t* b, int depth,
    typename Target::Floats (&tile)[kStripRows][kVectors]) {
  using Words = typename Target::Words;
  for (int i = 0; i < depth; ++i, b += kVectors * Target::kLanes) {
    Words columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = Target::template Load<Words>(b + v * Target::kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kStripRows; ++r) {
      const Words row = Target::BroadcastWord(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) tile[r][v] = Target::MultiplyAdd(tile[r][v], row, columns[v]);
    }
  }
}

// ---- Scores: Q Kᵀ of a panel, masked where not every row sees it whole, with each row's running maximum.

template <typename Target>
struct StripScores {
  alignas(64) float scores[kStripRows][kMaxBlockKeys];
  alignas(64) uint32_t probabilities[kStripRows][kMaxBlockKeys / Target::kWordElements];
  typename Target::Floats max[kStripRows];    // lane by lane
  typename Target::Floats decay[kStripRows];  // what the state so far is multiplied by; all lanes equal
};

template <typename Target, bool kMasked>
void ScorePanel(const StripBlock& block, int key, StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  using Ints = typename Target::Ints;
  constexpr int kVectors = Target::kTileVectors;
  constexpr int kLanes = Target::kLanes;
  const int query_words = DivideRoundingUp(block.head_dim, kLanes * Target::kWordElements) * kLanes;
  Floats tile[kStripRows][kVectors] = {};
  MultiplyTile<Target, kVectors>(block.queries, query_words, block.keys + int64_t{key} * query_words,
                                 DivideRoundingUp(block.head_dim, Target::kWordElements), tile);
#pragma GCC unroll 6
  for (int r = 0; r < kStripRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Floats score = tile[r][v];
      if constexpr (kMasked) {
        const Ints number = Target::LaneNumbers() + (key + v * kLanes);
        const Floats hidden = Target::Broadcast(-std::numeric_limits<float>::infinity());
        score = number >= block.row_begin[r] ? score : hidden;
        score = number < block.row_end[r] ? score : hidden;
      }
      strip.max[r] = Target::Max(strip.max[r], score);
      Target::Store(&strip.scores[r][key + v * kLanes], score);
    }
  }
}

// ---- Softmax: probabilities of the block's keys against the new maximum, and the state's decay.

template <typename Target>
void UpdateSoftmax(const StripBlock& block, int key_begin, int key_end, StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  constexpr int kLanes = Target::kLanes;
  const Floats hidden = Target::Broadcast(-std::numeric_limits<float>::infinity());
  const Floats scale = Target::Broadcast(block.scale_log2e);
  for (int r = 0; r < kStripRows; ++r) {
    const Floats old_max = Target::Broadcast(block.max[r]);
    const Floats block_max = Target::ReduceMax(strip.max[r]);
    const Floats new_max = Target::Max(old_max, block_max * scale);
    // A row that has seen nothing keeps −∞, but is shifted by 0: −∞ − (−∞) is NaN.
    const Floats shift = new_max > hidden ? new_max : Floats{};
    strip.decay[r] = Target::Exp2Degree5(old_max - shift);
    Floats sum = {};
    for (int key = key_begin; key < key_end; key += 2 * kLanes) {
      const Floats first = Target::template Load<Floats>(&strip.scores[r][key]);
      const Floats second = Target::template Load<Floats>(&strip.scores[r][key + kLanes]);
      sum = Target::StoreProbabilities(&strip.probabilities[r][key / Target::kWordElements],
                                       Target::Exp2(first * scale - shift),
                                       Target::Exp2(second * scale - shift), sum);
    }
    block.max[r] = new_max[0];
    block.sum[r] = block.sum[r] * strip.decay[r][0] + Target::ReduceSum(sum)[0];
  }
}

// ---- Output: the state decays, P V is added.

template <typename Target, int kVectors>
void AddColumns(const StripBlock& block, int key_begin, int key_end, int first, StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  constexpr int kLanes = Target::kLanes;
  const int padded_dim = DivideRoundingUp(block.head_dim, kLanes) * kLanes;
  const int begin = key_begin / Target::kWordElements;
  const int end = key_end / Target::kWordElements;
  float* output = block.output + first * kLanes;
  Floats tile[kStripRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kStripRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      tile[r][v] = Target::template Load<Floats>(output + r * padded_dim + v * kLanes) * strip.decay[r];
    }
  }
  const uint32_t* values =
      block.values + int64_t{first} * kLanes * (block.block_keys / Target::kWordElements);
  MultiplyTile<Target, kVectors>(&strip.probabilities[0][begin], kMaxBlockKeys / Target::kWordElements,
                                 values + int64_t{begin} * kVectors * kLanes, end - begin, tile);
#pragma GCC unroll 6
  for (int r = 0; r < kStripRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Target::Store(output + r * padded_dim + v * kLanes, tile[r][v]);
  }
}

// ---- One strip against one block.

template <typename Target>
void AttendStrip(const StripBlock& block) {
  constexpr int kPanelKeys = Target::kLanes * Target::kTileVectors;
  static_assert(kMaxBlockKeys % kPanelKeys == 0 && Target::kTileVectors % 2 == 0);
  const int last = kStripRows - 1;
  const int begin = block.row_begin[0] / kPanelKeys * kPanelKeys;
  const int end = DivideRoundingUp(block.row_end[last], kPanelKeys) * kPanelKeys;
  StripScores<Target> strip;
  for (auto& max : strip.max) max = Target::Broadcast(-std::numeric_limits<float>::infinity());
  for (int key = begin; key < end; key += kPanelKeys) {
    if (block.row_begin[last] <= key && key + kPanelKeys <= block.row_end[0]) {
      ScorePanel<Target, false>(block, key, strip);
    } else {
      ScorePanel<Target, true>(block, key, strip);
    }
  }
  UpdateSoftmax(block, begin, end, strip);
  ForEachColumnPanel<Target>(block.head_dim, [&](int first, int vectors) {
    if (vectors == 1) return AddColumns<Target, 1>(block, begin, end, first, strip);
    if (vectors == 2) return AddColumns<Target, 2>(block, begin, end, first, strip);
    if constexpr (Target::kTileVectors == 4) {
      if (vectors == 3) return AddColumns<Target, 3>(block, begin, end, first, strip);
      AddColumns<Target, 4>(block, begin, end, first, strip);
    }
  });
}

template <typename Target, typename Source>
constexpr AttentionKernel MakeAttentionKernel() {
  return {.word_elements = Target::kWordElements,
          .lanes = Target::kLanes,
          .panel_keys = Target::kLanes * Target::kTileVectors,
          .pack_queries = PackQueries<Target, Source>,
          .pack_keys = PackKeys<Target, Source>,
          .pack_values = PackValues<Target, Source>,
          .attend = AttendStrip<Target>};
}

// ---- The f32 target of any instruction set: bf16 inputs are widened as they are packed.

template <int kLanes, int kVectorsOfTile>
struct F32Target : Vectors<kLanes> {
  using typename Vectors<kLanes>::Floats;
  using typename Vectors<kLanes>::Words;
  static constexpr int kWordElements = 1;
  static constexpr int kTileVectors = kVectorsOfTile;

  static Floats MultiplyAdd(Floats acc, Words a, Words b) { return acc + (Floats)a * (Floats)b; }
  static Floats Exp2(Floats x) { return Vectors<kLanes>::Exp2Degree5(x); }
  static Floats StoreProbabilities(uint32_t* to, Floats a, Floats b, Floats sum) {
    Vectors<kLanes>::Store(to, a);
    Vectors<kLanes>::Store(to + kLanes, b);
    return sum + (a + b);
  }
};

}  // namespace
}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_STRIP_H_
