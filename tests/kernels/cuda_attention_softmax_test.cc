// The softmax of the CUDA attention kernels over rows of a million keys, on a warp of the emulated chip: the
// kernels themselves would take it too long.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_softmax.cuh"
#include "tests/kernels/cuda_emulator.h"
#include "tests/kernels/random_band.h"

namespace meshfill {
namespace {

constexpr uint32_t kRows = 16, kColumns = 8;  // of O
constexpr uint32_t kKeys = 1 << 20;
constexpr float kScale = 0.125f;  // of head_dim 64

// Two values a column: what comes first must not weigh less, or more, than what comes last.
double ValueOf(uint32_t key) { return key < kKeys / 2 ? 1 : -1; }

struct State {
  std::vector<float> o = std::vector<float>(kRows * kColumns);
  std::vector<float> lse = std::vector<float>(kRows);
};

// Key tiles of kElements · 2 keys, from first to last; `scores` is [kRows, kKeys].
template <int kElements>
std::string RunSoftmax(const std::vector<float>& scores, uint64_t seed, State& state) {
  constexpr uint32_t kTileKeys = kElements * 2;
  const AttentionParams params{.shape = {.q_tokens = kRows, .q_heads = 1, .head_dim = kColumns},
                               .o = state.o.data(),
                               .lse = state.lse.data(),
                               .scale_log2 = kScale * std::numbers::log2e_v<float>,
                               .carry_in = false};
  std::vector<float> probabilities(kRows * kTileKeys);
  EmulatedCta warp(32, 0, 1, 64, seed);
  return warp.Run([&] {
    const uint32_t lane = EmulatedMachine::Thread();
    RowPair rows;
    float output[kColumns / 2] = {}, tile[kElements], rescale[2];
    for (uint32_t first_key = 0; first_key < kKeys; first_key += kTileKeys) {
      for (int i = 0; i < kElements; ++i) {
        const uint32_t key = first_key + AccumulatorColumn(lane, i);
        tile[i] = key < kKeys ? scores[AccumulatorRow(lane, i) * kKeys + key] : kNegativeInfinity;
      }
      if (UpdateSoftmax<EmulatedMachine>(tile, params.scale_log2, rows, rescale))
        RescaleRows(output, rescale);
      for (int i = 0; i < kElements; ++i) {
        probabilities[AccumulatorRow(lane, i) * kTileKeys + AccumulatorColumn(lane, i)] = tile[i];
      }
      EmulatedMachine::SyncThreads();
      for (int i = 0; i < std::ssize(output); ++i) {
        const float* const row = &probabilities[AccumulatorRow(lane, i) * kTileKeys];
        for (uint32_t begin = 0; begin < kTileKeys; begin += 16) {  // a product's
          double sum = 0;
          for (uint32_t key = begin; key < begin + 16; ++key) sum += row[key] * ValueOf(first_key + key);
          output[i] = static_cast<float>(output[i] + sum);
        }
      }
      EmulatedMachine::SyncThreads();
    }
    StoreRows<EmulatedMachine>(params, /*head=*/0, /*first_row=*/0, lane, rows, output);
  });
}

// As close as FlashAttention's form is. Half an ulp of the maximum at each tile would be 2.5e-3 here.
TEST(CudaAttentionSoftmaxTest, AMillionKeysDoNotDrift) {
  const uint32_t seed = TestSeed();
  SCOPED_TRACE(absl::StrCat("MESHFILL_SEED=", seed));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3.5f / kScale);
  std::vector<float> scores(size_t{kRows} * kKeys);
  for (float& score : scores) score = normal(random);
  std::vector<double> lse(kRows), o(kRows);
  for (uint32_t row = 0; row < kRows; ++row) {
    const float* const of_row = &scores[size_t{row} * kKeys];
    const double max = *std::max_element(of_row, of_row + kKeys);
    double sum = 0, weighted = 0;
    for (uint32_t key = 0; key < kKeys; ++key) {
      const double p = std::exp(double{kScale} * (of_row[key] - max));
      sum += p;
      weighted += p * ValueOf(key);
    }
    lse[row] = kScale * max + std::log(sum);
    o[row] = weighted / sum;
  }
  State of_64, of_80, of_96, of_128;  // the keys of the kernels' tiles
  ASSERT_EQ(RunSoftmax<32>(scores, random(), of_64), "");
  ASSERT_EQ(RunSoftmax<40>(scores, random(), of_80), "");
  ASSERT_EQ(RunSoftmax<48>(scores, random(), of_96), "");
  ASSERT_EQ(RunSoftmax<64>(scores, random(), of_128), "");
  for (const State* const state : {&of_64, &of_80, &of_96, &of_128}) {
    for (uint32_t row = 0; row < kRows; ++row) {
      EXPECT_NEAR(state->lse[row], lse[row], 4e-4) << "row " << row;
      for (uint32_t column = 0; column < kColumns; ++column) {
        EXPECT_NEAR(state->o[row * kColumns + column], o[row], 3e-4) << "row " << row;
      }
    }
  }
}

// One row's largest score rises by `step` powers of two a tile. Its probabilities are relative to the same
// score until one would be above 2^8.
TEST(CudaAttentionSoftmaxTest, AShiftStaysUntilAProbabilityWouldBeAbove256) {
  for (const float step : {0.0f, 0.5f, 3.0f, 7.9f, 8.1f, 40.0f}) {
    EmulatedCta warp(32, 0, 1, 64, /*seed=*/1);
    const std::string error = warp.Run([&] {
      const uint32_t lane = EmulatedMachine::Thread();
      RowPair rows;
      float tile[8], rescale[2];
      double shift = 0, sum = 0;  // of row 5, which alone rises: log2 of scores
      for (int number = 0; number < 40; ++number) {
        const float peak = 2 + step * number;
        for (int i = 0; i < 8; ++i) {
          tile[i] = (AccumulatorRow(lane, i) == 5 && AccumulatorColumn(lane, i) == 3 ? peak : 1) / kScale;
        }
        const bool rescales = UpdateSoftmax<EmulatedMachine>(tile, kScale, rows, rescale);
        const bool moves = number == 0 || peak > shift + 8;
        EXPECT_EQ(rescales, moves) << "step " << step << ", tile " << number;
        if (moves) sum *= number == 0 ? 0 : std::exp2(shift - peak), shift = peak;
        sum += std::exp2(peak - shift) + 15 * std::exp2(1 - shift);
        for (int row = 0; row < 2; ++row) {
          float of_row = rows.sum[row];
          of_row += EmulatedMachine::ShuffleXor(of_row, 1);
          of_row += EmulatedMachine::ShuffleXor(of_row, 2);
          if (AccumulatorRow(lane, 2 * row) == 5) {
            EXPECT_NEAR(rows.shift[row] * kScale, shift, 1e-4);
            EXPECT_NEAR(of_row, sum, 1e-5 * sum) << "step " << step << ", tile " << number;
          } else {
            EXPECT_EQ(rescale[row], number == 0 ? 0 : 1) << "of other rows";
          }
        }
      }
    });
    EXPECT_EQ(error, "");
  }
}

}  // namespace
}  // namespace meshfill
