// The attention kernel of a target, as templates over its vectors and its multiply-add (FlashAttention-2,
// §3.1).
//
// A Target derives from Vectors<lanes> and says:
//   kWordElements                       1 (f32) or 2 (bf16 pairs)
//   kStripRows                          rows of a strip, and of a register tile of vectors
//   kBlockKeys                          the most keys in a block
//   kTaskRows                           the most rows in a task
//   kTileVectors                        vectors across a register tile
//   MultiplyAdd(acc, a, b)              acc + a·b on words
//   Exp2(x)                             2^x, as accurate as the probabilities' type needs; 0 for −∞
//   StoreProbabilities(to, a, b, sum)   packs two vectors of probabilities, returns the sum with theirs added
//
// Included only by the files that are compiled for one instruction set; see attention_vectors.h.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_STRIP_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_STRIP_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_vectors.h"

namespace meshfill {
namespace {

// bf16 inputs, as their bits.
using Bf16Bits = uint16_t;

constexpr int Min(int a, int b) { return a < b ? a : b; }
constexpr int DivideRoundingUp(int a, int b) { return (a + b - 1) / b; }

// ---- Packing. Whole vectors of the input take the short way; the last rows and columns are copied and
// padded first.

// The vector of words at `elements`.
template <typename Target, typename Source>
typename Target::Words LoadWords(const Source* elements) {
  using Words = typename Target::Words;
  if constexpr (sizeof(Source) * Target::kWordElements == sizeof(uint32_t)) {
    return Target::template Load<Words>(elements);
  } else {
    return Target::Widen(Target::template Load<typename Target::Halves>(elements)) << 16;
  }
}

// The same, of which only the first `count` elements exist, at most a vector's and perhaps none: zeros
// follow.
template <typename Target, typename Source>
typename Target::Words LoadSomeWords(const Source* elements, int count) {
  Source padded[Target::kLanes * Target::kWordElements] = {};
  if (count > 0) {
    std::memcpy(padded, elements, Min(count, Target::kLanes * Target::kWordElements) * sizeof(Source));
  }
  return LoadWords<Target>(padded);
}

// Six rows by four vectors fill the 32 registers of AVX-512: 24 accumulators, 4 keys' vectors, a broadcast
// query. By two vectors they fill the 16 registers of AVX2 and SSE2 in the same way.
constexpr int kVectorStripRows = 6;

// A strip's scores and probabilities are at most 12 KiB then.
constexpr int kVectorBlockKeys = 256;

// A task's queries and outputs are at most 384 KiB then, of an L2 of 1 MiB.
constexpr int kVectorTaskRows = 384;

// packed: [kStripRows, QueryWords], words of the head dimension.
template <typename Target, typename Source>
void PackQueries(const void* rows, int count, int head_dim, uint32_t* packed) {
  constexpr int kElements = Target::kLanes * Target::kWordElements;
  const Source* source = static_cast<const Source*>(rows);
  for (int row = 0; row < Target::kStripRows; ++row) {
    for (int d = 0; d < head_dim; d += kElements, packed += Target::kLanes) {
      const Source* from = source + row * head_dim + d;
      const int remaining = row < count ? head_dim - d : 0;
      Target::Store(
          packed, remaining >= kElements ? LoadWords<Target>(from) : LoadSomeWords<Target>(from, remaining));
    }
  }
}

// packed: [panels, QueryWords, panel keys]. Keys are packed up to the end of their panel.
template <typename Target, typename Source>
void PackKeys(const void* rows, int count, int head_dim, uint32_t* packed) {
  constexpr int kLanes = Target::kLanes;
  constexpr int kPanelKeys = kLanes * Target::kTileVectors;
  constexpr int kElements = kLanes * Target::kWordElements;
  const int query_words = DivideRoundingUp(head_dim, kElements) * kLanes;
  const int packed_keys = DivideRoundingUp(count, kPanelKeys) * kPanelKeys;
  for (int key = 0; key < packed_keys; key += kLanes) {
    const Source* source = static_cast<const Source*>(rows) + int64_t{key} * head_dim;
    uint32_t* to = packed + int64_t{key / kPanelKeys} * query_words * kPanelKeys + key % kPanelKeys;
    for (int d = 0; d < head_dim; d += kElements) {
      typename Target::Words words[kLanes];
      if (key + kLanes <= count && d + kElements <= head_dim) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) words[i] = LoadWords<Target>(source + i * head_dim + d);
      } else {
        for (int i = 0; i < kLanes; ++i) {
          words[i] = LoadSomeWords<Target>(source + i * head_dim + d, key + i < count ? head_dim - d : 0);
        }
      }
      Target::Transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) Target::Store(to + i * kPanelKeys, words[i]);
      to += kLanes * kPanelKeys;
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

// A vector of columns of one row (f32), or of a row and the next, in pairs (bf16).
template <typename Target, typename Source>
typename Target::Words LoadColumns(const Source* row, int head_dim) {
  if constexpr (Target::kWordElements == 1) {
    return LoadWords<Target>(row);
  } else {
    using Halves = typename Target::Halves;
    return Target::Widen(Target::template Load<Halves>(row)) |
           Target::Widen(Target::template Load<Halves>(row + head_dim)) << 16;
  }
}

// The same where only `rows` rows, perhaps none, and `columns` columns exist.
template <typename Target, typename Source>
typename Target::Words LoadSomeColumns(const Source* row, int head_dim, int rows, int columns) {
  Source padded[Target::kWordElements][Target::kLanes] = {};
  for (int i = 0; i < Min(rows, Target::kWordElements); ++i) {
    std::memcpy(padded[i], row + i * head_dim, Min(columns, Target::kLanes) * sizeof(Source));
  }
  return LoadColumns<Target>(padded[0], Target::kLanes);
}

// packed: [column panels, words of the keys, panel columns]. Keys are packed up to the end of their key
// panel.
template <typename Target, typename Source>
void PackValues(const void* rows, int count, int head_dim, int block_keys, uint32_t* packed) {
  constexpr int kLanes = Target::kLanes;
  constexpr int kPanelKeys = kLanes * Target::kTileVectors;
  const int packed_keys = DivideRoundingUp(count, kPanelKeys) * kPanelKeys;
  const int block_words = block_keys / Target::kWordElements;
  ForEachColumnPanel<Target>(head_dim, [&](int first, int vectors) {
    uint32_t* to = packed + int64_t{first} * kLanes * block_words;
    const int end = (first + vectors) * kLanes;
    for (int key = 0; key < packed_keys; key += Target::kWordElements) {
      const Source* row = static_cast<const Source*>(rows) + int64_t{key} * head_dim;
      const bool whole = key + Target::kWordElements <= count && end <= head_dim;
      for (int d = first * kLanes; d < end; d += kLanes, to += kLanes) {
        Target::Store(to, whole ? LoadColumns<Target>(row + d, head_dim)
                                : LoadSomeColumns<Target>(row + d, head_dim, count - key, head_dim - d));
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
    typename Target::Floats (&tile)[Target::kStripRows][kVectors]) {
  using Words = typename Target::Words;
  for (int i = 0; i < depth; ++i, b += kVectors * Target::kLanes) {
    Words columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = Target::template Load<Words>(b + v * Target::kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Target::kStripRows; ++r) {
      const Words row = Target::BroadcastWord(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) tile[r][v] = Target::MultiplyAdd(tile[r][v], row, columns[v]);
    }
  }
}

// ---- Scores: Q Kᵀ of a panel, masked where not every row sees it whole, with each row's running maximum.

template <typename Target>
struct StripScores {
  alignas(64) float scores[Target::kStripRows][Target::kBlockKeys];
  alignas(64) uint32_t probabilities[Target::kStripRows][Target::kBlockKeys / Target::kWordElements];
  typename Target::Floats max[Target::kStripRows];  // lane by lane
  // All lanes equal:
  typename Target::Floats shift[Target::kStripRows];  // what scores are measured from, in exponents of 2
  typename Target::Floats decay[Target::kStripRows];  // what the state so far is multiplied by
};

template <typename Target, bool kMasked>
void ScorePanel(const StripBlock& block, int key, StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  using Ints = typename Target::Ints;
  constexpr int kVectors = Target::kTileVectors;
  constexpr int kLanes = Target::kLanes;
  const int query_words = DivideRoundingUp(block.head_dim, kLanes * Target::kWordElements) * kLanes;
  Floats tile[Target::kStripRows][kVectors] = {};
  MultiplyTile<Target, kVectors>(block.queries, query_words, block.keys + int64_t{key} * query_words,
                                 DivideRoundingUp(block.head_dim, Target::kWordElements), tile);
#pragma GCC unroll 6
  for (int r = 0; r < Target::kStripRows; ++r) {
    Floats max = strip.max[r];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Floats score = tile[r][v];
      if constexpr (kMasked) {
        const Ints number = Target::LaneNumbers() + (key + v * kLanes);
        const Floats hidden = Target::Broadcast(-std::numeric_limits<float>::infinity());
        score = number >= block.row_begin[r] ? score : hidden;
        score = number < block.row_end[r] ? score : hidden;
      }
      max = Target::Max(max, score);
      Target::Store(&strip.scores[r][key + v * kLanes], score);
    }
    strip.max[r] = max;
  }
}

// ---- Softmax: the state's new maximum and decay, then the probabilities of the block's keys. The rows'
// horizontal reductions stand side by side, so that their latencies overlap.

template <typename Target>
void UpdateMax(const StripBlock& block, StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  const Floats hidden = Target::Broadcast(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 6
  for (int r = 0; r < Target::kStripRows; ++r) {
    const Floats old_max = Target::Broadcast(block.max[r]);
    const Floats new_max = Target::Max(old_max, Target::ReduceMax(strip.max[r]) * block.scale_log2e);
    // A row that has seen nothing keeps −∞, but is shifted by 0: −∞ − (−∞) is NaN.
    strip.shift[r] = new_max > hidden ? new_max : Floats{};
    strip.decay[r] = Target::Exp2Degree5(old_max - strip.shift[r]);
    block.max[r] = new_max[0];
  }
}

template <typename Target>
void Exponentiate(const StripBlock& block, int key_begin, int key_end, StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  constexpr int kLanes = Target::kLanes;
  const Floats scale = Target::Broadcast(block.scale_log2e);
  Floats sums[Target::kStripRows];
  for (int r = 0; r < Target::kStripRows; ++r) {
    const Floats shift = strip.shift[r];
    Floats sum = {};
#pragma GCC unroll 2
    for (int key = key_begin; key < key_end; key += 2 * kLanes) {
      const Floats first = Target::template Load<Floats>(&strip.scores[r][key]);
      const Floats second = Target::template Load<Floats>(&strip.scores[r][key + kLanes]);
      sum = Target::StoreProbabilities(&strip.probabilities[r][key / Target::kWordElements],
                                       Target::Exp2(first * scale - shift),
                                       Target::Exp2(second * scale - shift), sum);
    }
    sums[r] = sum;
  }
#pragma GCC unroll 6
  for (int r = 0; r < Target::kStripRows; ++r) {
    block.sum[r] = block.sum[r] * strip.decay[r][0] + Target::ReduceSum(sums[r])[0];
  }
}

// ---- Output: the state decays, P V is added.

template <typename Target, int kVectors>
void AddColumns(const StripBlock& block, int key_begin, int key_end, int first,
                const StripScores<Target>& strip) {
  using Floats = typename Target::Floats;
  constexpr int kLanes = Target::kLanes;
  const int padded_dim = DivideRoundingUp(block.head_dim, kLanes) * kLanes;
  const int begin = key_begin / Target::kWordElements;
  const int end = key_end / Target::kWordElements;
  float* output = block.output + first * kLanes;
  Floats tile[Target::kStripRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < Target::kStripRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      tile[r][v] = Target::template Load<Floats>(output + r * padded_dim + v * kLanes) * strip.decay[r];
    }
  }
  const uint32_t* values =
      block.values + int64_t{first} * kLanes * (block.block_keys / Target::kWordElements);
  MultiplyTile<Target, kVectors>(&strip.probabilities[0][begin], Target::kBlockKeys / Target::kWordElements,
                                 values + int64_t{begin} * kVectors * kLanes, end - begin, tile);
#pragma GCC unroll 6
  for (int r = 0; r < Target::kStripRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Target::Store(output + r * padded_dim + v * kLanes, tile[r][v]);
  }
}

// ---- One strip against one block.

template <typename Target>
void AttendStrip(const StripBlock& block) {
  constexpr int kPanelKeys = Target::kLanes * Target::kTileVectors;
  static_assert(Target::kBlockKeys % kPanelKeys == 0 && Target::kTileVectors % 2 == 0);
  const int last = Target::kStripRows - 1;
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
  UpdateMax(block, strip);
  Exponentiate(block, begin, end, strip);
  ForEachColumnPanel<Target>(block.head_dim, [&](int first, int vectors) {
    if (vectors == 1) return AddColumns<Target, 1>(block, begin, end, first, strip);
    if (vectors == 2) return AddColumns<Target, 2>(block, begin, end, first, strip);
    if constexpr (Target::kTileVectors == 4) {
      if (vectors == 3) return AddColumns<Target, 3>(block, begin, end, first, strip);
      AddColumns<Target, 4>(block, begin, end, first, strip);
    }
  });
}

template <typename Target>
void AttendStrips(const StripBlock* strips, int count) {
  for (int i = 0; i < count; ++i) AttendStrip<Target>(strips[i]);
}

template <typename Target, typename Source>
constexpr AttentionKernel MakeAttentionKernel(void (*attend)(const StripBlock* strips,
                                                             int count) = AttendStrips<Target>) {
  return {.strip_rows = Target::kStripRows,
          .block_keys = Target::kBlockKeys,
          .word_elements = Target::kWordElements,
          .lanes = Target::kLanes,
          .task_rows = Target::kTaskRows,
          .pack_queries = PackQueries<Target, Source>,
          .pack_keys = PackKeys<Target, Source>,
          .pack_values = PackValues<Target, Source>,
          .attend = attend};
}

// ---- The f32 target of any instruction set: bf16 inputs are widened as they are packed.

template <int kLanes, int kVectorsOfTile>
struct F32Target : Vectors<kLanes> {
  using typename Vectors<kLanes>::Floats;
  using typename Vectors<kLanes>::Words;
  static constexpr int kStripRows = kVectorStripRows;
  static constexpr int kBlockKeys = kVectorBlockKeys;
  static constexpr int kTaskRows = kVectorTaskRows;
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
