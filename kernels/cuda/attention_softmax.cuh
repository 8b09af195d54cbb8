// The softmax of a warp's 16 rows while their keys pass by (FlashAttention-2, algorithm 1), and how the
// finished rows join the state that was carried in. Two rows a thread: those of its accumulator elements
// (fragments.h).
//
// `Machine` is the chip: ptx_sm80.cuh, ptx_sm90.cuh, or the tests' emulator.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_SOFTMAX_CUH_
#define MESHFILL_KERNELS_CUDA_ATTENTION_SOFTMAX_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/attention_params.h"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/fragments.h"

namespace meshfill {

inline constexpr float kNegativeInfinity = -__builtin_inff();

// Two rows' shift, and this thread's share of Σ 2^(scale_log2 · (s − shift)). The shift is a score that was
// the row's maximum; later ones are above it by kSlack powers of two at most.
struct RowPair {
  float shift[2] = {kNegativeInfinity, kNegativeInfinity};
  float sum[2] = {0, 0};
};

// Hides the keys that the thread's two rows do not see. `first_key`: the slot of column 0.
template <int kElements>
MESHFILL_DEVICE void MaskScores(float (&scores)[kElements], uint32_t first_key, uint32_t lane,
                                const KeySlots (&visible)[2]) {
  MESHFILL_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (!visible[i % 4 / 2].Contains(first_key + AccumulatorColumn(lane, i))) scores[i] = kNegativeInfinity;
  }
}

// Scores to probabilities times 2^(at most kSlack), in place. True: a row of the warp has a new shift, and
// the rows' accumulators so far must be multiplied by `rescale`. As FlashAttention-4 has it: a shift
// stays while no probability would be above 2^8, which costs neither f32 nor the 16-bit types a bit. In a
// long row that leaves hardly any key tile whose accumulators are rescaled.
template <class Machine, int kElements>
MESHFILL_DEVICE bool UpdateSoftmax(float (&scores)[kElements], float scale_log2, RowPair& rows,
                                   float (&rescale)[2]) {
  constexpr float kSlack = 8;
  float max[2] = {rows.shift[0], rows.shift[1]};
  MESHFILL_UNROLL
  for (int i = 0; i < kElements; i += 2) {
    max[i % 4 / 2] = fmaxf(max[i % 4 / 2], fmaxf(scores[i], scores[i + 1]));
  }
  float exponent[2];  // of the shift
  MESHFILL_UNROLL
  for (int row = 0; row < 2; ++row) {
    max[row] = fmaxf(max[row], Machine::ShuffleXor(max[row], 1));
    max[row] = fmaxf(max[row], Machine::ShuffleXor(max[row], 2));
    // False where no key was seen yet: −∞ − (−∞) is NaN, and anything − (−∞) is ∞.
    if ((max[row] - rows.shift[row]) * scale_log2 <= kSlack) max[row] = rows.shift[row];
    const float finite = max[row] == kNegativeInfinity ? 0.0f : max[row];
    exponent[row] = finite * scale_log2;
    // The difference first: exactly 1 where the shift stays. An error here would grow with every key tile.
    rescale[row] = Machine::Exp2((rows.shift[row] - finite) * scale_log2);
    rows.shift[row] = max[row];
  }
  // Sums of this tile alone: added one by one, small terms would be lost in a long row's sum.
  float sum[2] = {0, 0};
  MESHFILL_UNROLL
  for (int i = 0; i < kElements; i += 2) {
    const int row = i % 4 / 2;
    scores[i] = Machine::Exp2(fmaf(scores[i], scale_log2, -exponent[row]));
    scores[i + 1] = Machine::Exp2(fmaf(scores[i + 1], scale_log2, -exponent[row]));
    sum[row] += scores[i] + scores[i + 1];
  }
  MESHFILL_UNROLL
  for (int row = 0; row < 2; ++row) rows.sum[row] = fmaf(rows.sum[row], rescale[row], sum[row]);
  return Machine::Any(rescale[0] != 1.0f || rescale[1] != 1.0f);
}

template <int kElements>
MESHFILL_DEVICE void RescaleRows(float (&output)[kElements], const float (&rescale)[2]) {
  MESHFILL_UNROLL
  for (int i = 0; i < kElements; ++i) output[i] *= rescale[i % 4 / 2];
}

// 16 keys a step: the A operand of P · V, rounded to T.
template <class Machine, class T, int kElements>
MESHFILL_DEVICE void PackProbabilities(const float (&probabilities)[kElements],
                                       uint32_t (&packed)[kElements / 8][4]) {
  MESHFILL_UNROLL
  for (int i = 0; i < kElements / 2; ++i) {
    packed[i / 4][i % 4] = Machine::template Pack<T>(probabilities[2 * i], probabilities[2 * i + 1]);
  }
}

// How a finished row and the carried state of that row become one:
// o = carried_weight · carried o + block_weight · Σ 2^… v.
struct RowMerge {
  float carried_weight;
  float block_weight;
  float lse;
};

// `sum` > 0 or NaN: the row saw a key. `carried_lse` is −∞ where nothing is carried.
MESHFILL_DEVICE RowMerge MergeRow(float shift, float sum, float scale_log2, float carried_lse) {
  constexpr float kLn2 = 0.693147180559945309f;
  const float lse = shift * scale_log2 * kLn2 + logf(sum);
  const float merged = fmaxf(lse, carried_lse) + log1pf(expf(-fabsf(lse - carried_lse)));
  return {expf(carried_lse - merged), expf(lse - merged) / sum, merged};
}

// Writes 16 rows from q slot `first_row` on of a head. A row that saw no key in this block keeps the carried
// bits, or is o = 0, lse = −∞ where nothing is carried.
template <class Machine, int kElements>
MESHFILL_DEVICE void StoreRows(const AttentionParams& params, uint32_t head, uint32_t first_row,
                               uint32_t lane, const RowPair& rows, const float (&output)[kElements]) {
  MESHFILL_UNROLL
  for (int row = 0; row < 2; ++row) {
    float sum = rows.sum[row];
    sum += Machine::ShuffleXor(sum, 1);
    sum += Machine::ShuffleXor(sum, 2);
    const uint32_t slot = first_row + AccumulatorRow(lane, 2 * row);
    const uint64_t index = uint64_t{head} * params.shape.q_tokens + slot;
    const bool empty = sum == 0.0f, inside = slot < params.shape.q_tokens;
    // One of a row's four threads reads its lse, and writes it. (Four that read would have to wait for each
    // other before one writes, and a wait for part of a warp keeps the compiler from seeing in the kernel's
    // loops what is one for the whole warp.)
    const bool reads = params.carry_in && inside && lane % 4 == 0;
    const float carried_lse = Machine::Shuffle(reads ? params.lse[index] : kNegativeInfinity, lane & ~3u);
    if (!inside || (empty && params.carry_in)) continue;
    const RowMerge merge = empty ? RowMerge{0.0f, 0.0f, kNegativeInfinity}
                                 : MergeRow(rows.shift[row], sum, params.scale_log2, carried_lse);
    if (lane % 4 == 0) params.lse[index] = merge.lse;
    float* o = params.o + index * params.shape.head_dim;
    const bool carried = carried_lse != kNegativeInfinity;
    // The loads of a batch are under way together. Of 256 columns there is room for one pair's: the row is
    // asked for first, in sectors of 32 bytes, which takes no registers.
    constexpr int kBatch = kElements <= 64 ? kElements : 4;
    static_assert(kElements % kBatch == 0);
    if constexpr (kBatch < kElements) {
      MESHFILL_UNROLL
      for (uint32_t column = 0; column < 2 * kElements; column += 32) {
        const uint32_t sector = column + 8 * (lane % 4);  // each of a row's four threads asks for its share
        if (carried && sector < params.shape.head_dim) Machine::Prefetch(o + sector);
      }
    }
    MESHFILL_UNROLL
    for (int batch = 2 * row; batch < kElements; batch += kBatch) {
      float before[kBatch / 2] = {};
      MESHFILL_UNROLL
      for (int i = 0; i < kBatch; i += 4) {
        const uint32_t column = AccumulatorColumn(lane, batch + i);
        if (carried && column < params.shape.head_dim) Machine::LoadPair(&before[i / 2], o + column);
      }
      MESHFILL_UNROLL
      for (int i = 0; i < kBatch; i += 4) {
        const uint32_t column = AccumulatorColumn(lane, batch + i);
        if (column >= params.shape.head_dim) continue;
        float first = output[batch + i] * merge.block_weight;
        float second = output[batch + i + 1] * merge.block_weight;
        if (carried) {
          first = fmaf(merge.carried_weight, before[i / 2], first);
          second = fmaf(merge.carried_weight, before[i / 2 + 1], second);
        }
        Machine::StorePair(o + column, first, second);
      }
    }
  }
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_SOFTMAX_CUH_
