#include "engine/speed/pool_speed.h"

#include <cmath>
#include <memory>
#include <vector>

#include "engine/plan/planner.h"
#include "engine/speed/layer_probe.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/packed_matrix.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

TEST(FitCostLine, FindsTheLineThatSamplesLieOn) {
  std::mt19937_64 random(TestSeed());
  std::uniform_real_distribution<double> exponent(-9, 0);
  for (int draw = 0; draw < 200; ++draw) {
    const CostLine line = {.fixed = std::pow(10, exponent(random)),
                           .per_unit = std::pow(10, exponent(random))};
    std::vector<CostSample> samples;
    for (const double units : {1.0, 4.0, 16.0}) {
      const double scaled = units * line.fixed / line.per_unit;
      samples.push_back({.units = scaled, .seconds = line.fixed + line.per_unit * scaled});
    }
    const CostLine found = FitCostLine(samples);
    EXPECT_NEAR(found.fixed, line.fixed, 1e-6 * line.fixed);
    EXPECT_NEAR(found.per_unit, line.per_unit, 1e-6 * line.per_unit);
  }
}

TEST(FitCostLine, NoPartIsNegative) {
  // Larger pieces are less efficient: a line through them would begin below 0.
  const CostSample growing[] = {{1, 1}, {2, 3}, {4, 9}};
  const CostLine through_zero = FitCostLine(growing);
  EXPECT_EQ(through_zero.fixed, 0);
  EXPECT_GT(through_zero.per_unit, 0);
  // Noise: the larger piece was faster.
  const CostSample falling[] = {{1, 3}, {2, 2}, {4, 1}};
  const CostLine constant = FitCostLine(falling);
  EXPECT_GT(constant.fixed, 0);
  EXPECT_EQ(constant.per_unit, 0);
}

TEST(FitCostLine, OneSampleIsARate) {
  const CostSample one[] = {{4, 2}};
  const CostLine line = FitCostLine(one);
  EXPECT_EQ(line.fixed, 0);
  EXPECT_DOUBLE_EQ(line.per_unit, 0.5);
}

TEST(ShareOf, ARankWithHalfAStreamTakesTwiceAsLong) {
  PoolSpeed speed;
  speed.gemm_flops_per_second = speed.attention_flops_per_second = speed.merge_bytes_per_second = 8e9;
  speed.slice_seconds = speed.block_row_seconds = speed.token_seconds = 1e-3;
  const PoolSpeed half = ShareOf(0.5, speed);
  for (const auto rate : {&PoolSpeed::gemm_flops_per_second, &PoolSpeed::attention_flops_per_second,
                          &PoolSpeed::merge_bytes_per_second}) {
    EXPECT_EQ(half.*rate, 4e9);
  }
  for (const auto seconds :
       {&PoolSpeed::slice_seconds, &PoolSpeed::block_row_seconds, &PoolSpeed::token_seconds}) {
    EXPECT_EQ(half.*seconds, 2e-3);
  }
  EXPECT_EQ(half.lone_rank_speedup, 2);
  EXPECT_EQ(half.lm_head_bytes_per_second, speed.lm_head_bytes_per_second) << "the head is read by one rank";
}

TEST(MeasurePoolSpeed, RanksThatShareThreadsHaveTheirShare) {
  const ModelShape model{.layers = 2,
                         .hidden = 128,
                         .intermediate = 256,
                         .q_heads = 4,
                         .kv_heads = 2,
                         .head_dim = 32,
                         .vocab = 256,
                         .context_tokens = 4096,
                         .dtype = DType::kF32};
  for (const int ranks : {1, 2, 3, 8}) {
    const std::unique_ptr<Device> device = MakeCpuDevice(model.dtype, 2, ranks);
    const auto speed = MeasurePoolSpeed(model, *device, std::min(2, ranks), ranks);
    ASSERT_TRUE(speed.ok()) << speed.status();
    EXPECT_DOUBLE_EQ(speed->lone_rank_speedup, std::max(1.0, ranks / 2.0));
    EXPECT_LT(speed->slice_seconds, 0.5) << "it takes microseconds to begin";
    EXPECT_EQ(speed->slice_tokens, device->grain().slice_tokens);
    // No machine is so slow or so fast: of each the unit is right.
    EXPECT_LT(speed->token_seconds, 1e-3);
    EXPECT_LT(speed->block_row_seconds, 1e-2);
    EXPECT_LT(speed->start_seconds, 10);
    EXPECT_GT(speed->start_seconds, 0);
    for (const auto rate : {&PoolSpeed::gemm_flops_per_second, &PoolSpeed::attention_flops_per_second,
                            &PoolSpeed::merge_bytes_per_second, &PoolSpeed::lm_head_bytes_per_second}) {
      EXPECT_GT((*speed).*rate, 1e6);
      EXPECT_LT((*speed).*rate, 1e14);
      EXPECT_NE((*speed).*rate, PoolSpeed().*rate) << "it is measured, not assumed";
    }
    const auto choice = MakePlan(model, *speed, {.tokens = 1000, .ranks = ranks});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_GT(choice->plan.predicted.seconds, 0);
    EXPECT_TRUE(std::isfinite(choice->plan.predicted.seconds));
  }
}

// What is counted is what is run.
// What loads a GPU's kernels before a prompt does.
TEST(RunEachOperation, RunsOnAnyDeviceAndSaysWhatFails) {
  const ModelShape model = {.layers = 2,
                            .hidden = 64,
                            .intermediate = 96,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .vocab = 100,
                            .dtype = DType::kF32};
  const std::unique_ptr<Device> device = MakeCpuDevice(DType::kF32, 1, 1);
  StopToken stop;
  const auto stream = device->NewStream(&stop);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const absl::Status ran = RunEachOperation(model, **stream);
  EXPECT_TRUE(ran.ok()) << ran;
  stop.Stop();
  EXPECT_TRUE(absl::IsCancelled(RunEachOperation(model, **stream)));
}

TEST(LayerProbe, CountsTheWorkOfItsOperations) {
  const ModelShape model{.layers = 3,
                         .hidden = 8192,
                         .intermediate = 28672,
                         .q_heads = 64,
                         .kv_heads = 8,
                         .head_dim = 128,
                         .vocab = 1000,
                         .context_tokens = 4096,
                         .dtype = DType::kF32};
  const std::unique_ptr<Device> device = MakeCpuDevice(model.dtype, 1, 1);
  const auto stream = device->NewStream(nullptr);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto weights = MakeProbeWeights(model, **stream);
  ASSERT_TRUE(weights.ok()) << weights.status();
  // As wide as a device's grain, with groups of as many query heads.
  const ModelShape& shape = (*weights)->shape;
  EXPECT_EQ(shape.layers, 1);
  EXPECT_EQ(shape.hidden, 2048);
  EXPECT_EQ(shape.intermediate, 4096);
  EXPECT_EQ(shape.kv_heads, 2);
  EXPECT_EQ(shape.q_heads, 16);
  EXPECT_EQ(shape.vocab, 1000);
  const auto layer = [](const ModelShape& m) {
    return m.hidden * (2.0 * m.q_heads + 2 * m.kv_heads) * m.head_dim + 3.0 * m.hidden * m.intermediate;
  };
  EXPECT_NEAR((*weights)->layer_scale, layer(model) / layer(shape), 1e-9);

  const auto probe = LayerProbe::Make(*weights, **stream);
  ASSERT_TRUE(probe.ok()) << probe.status();
  EXPECT_DOUBLE_EQ((*probe)->TokenFlops(10), 10 * 2 * layer(shape));
  // Causal: of each query the keys up to its own, in two products of head_dim multiplications and additions.
  EXPECT_DOUBLE_EQ((*probe)->BlockFlops(100), 16 * 2 * 2 * 128 * 100 * 101 / 2.0);
  EXPECT_EQ((*probe)->BlockRows(100), 16 * 100);
  EXPECT_EQ((*probe)->MergeBytes(100), 16 * 100 * (128 + 1) * 4);
  EXPECT_EQ((*probe)->LmHeadBytes(), 2048 * 1000 * 4);
  // As many tokens as take about the grain's work, in multiples of 64; of a layer so wide the least.
  EXPECT_EQ((*probe)->slice_tokens(), 128);
  EXPECT_EQ((*probe)->block_tokens() % 64, 0);
  const double half_a_grain = device->grain().probe_flops / 2;
  EXPECT_LE((*probe)->BlockFlops((*probe)->block_tokens()), half_a_grain * 1.01);
  EXPECT_GE((*probe)->BlockFlops((*probe)->block_tokens()), half_a_grain * 0.75);
}

TEST(MeasurePoolSpeed, ProbesExpertsWithAsManyRowsAsTheyHave) {
  ModelShape model{.layers = 2,
                   .hidden = 64,
                   .q_heads = 4,
                   .kv_heads = 2,
                   .head_dim = 16,
                   .vocab = 256,
                   .context_tokens = 4096,
                   .kinds = {{.form = {.mlp = MlpKind::kExperts}, .layers = 2}},
                   .dtype = DType::kF32};
  const std::unique_ptr<Device> device = MakeCpuDevice(model.dtype, 1, 1);
  const int64_t one = device->grain().slice_tokens;
  const struct {
    int count, used;
    int64_t slice_tokens;
    int probed;  // as many as leave each its rows of a slice of 1,024
  } cases[] = {{8, 2, one, 4},       {5, 3, one, 1},       {100, 8, 2 * one, 6},
               {128, 8, 2 * one, 8}, {256, 8, 4 * one, 8}, {512, 4, 8 * one, 16}};
  for (const auto& [count, used, slice_tokens, probed] : cases) {
    model.experts = {.count = count, .used = used, .width = 16};
    EXPECT_EQ(SliceTokensOf(model, device->grain()), slice_tokens) << used << " of " << count;
    const auto speed = MeasurePoolSpeed(model, *device, 1, 1);
    ASSERT_TRUE(speed.ok()) << speed.status();
    EXPECT_EQ(speed->slice_tokens, slice_tokens);
    const auto stream = device->NewStream(nullptr);
    ASSERT_TRUE(stream.ok()) << stream.status();
    const auto weights = MakeProbeWeights(model, **stream);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ((*weights)->shape.experts.count, probed) << used << " of " << count;
    EXPECT_EQ((*weights)->shape.experts.used, 1);
  }
}

TEST(LayerProbe, PacksInFp8WhatTheCommonestLayerHasInFp8) {
  ModelShape model{.layers = 3,
                   .hidden = 64,
                   .intermediate = 128,
                   .q_heads = 4,
                   .kv_heads = 2,
                   .head_dim = 16,
                   .vocab = 256,
                   .context_tokens = 4096,
                   .fp8 = {.rows = 128, .columns = 128},
                   .dtype = DType::kF32};
  LayerForm some;
  some.wide.Add(LayerPart::kO);
  const std::unique_ptr<Device> device = MakeCpuDevice(model.dtype, 1, 1);
  const auto stream = device->NewStream(nullptr);
  ASSERT_TRUE(stream.ok()) << stream.status();
  for (const int with_wide : {1, 2}) {
    model.kinds = {{.form = {}, .layers = 3 - with_wide}, {.form = some, .layers = with_wide}};
    const auto weights = MakeProbeWeights(model, **stream);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const auto is_wide = [](const std::unique_ptr<PackedWeight>& weight) {
      return !dynamic_cast<const CpuWeight&>(*weight).wide().empty();
    };
    EXPECT_FALSE(is_wide((*weights)->layer.qkv));
    EXPECT_EQ(is_wide((*weights)->layer.o), with_wide == 2);
    EXPECT_FALSE(is_wide((*weights)->layer.down));
  }
}

}  // namespace
}  // namespace meshfill
