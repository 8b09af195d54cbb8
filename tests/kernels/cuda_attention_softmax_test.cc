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
      UpdateSoftmax<EmulatedMachine>(tile, params.scale_log2, rows, rescale);
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

}  // namespace
}  // namespace meshfill
