#include "engine/speed/pool_speed.h"

#include <cmath>
#include <memory>
#include <vector>

#include "engine/plan/planner.h"
#include "engine/speed/layer_probe.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
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
    const auto choice = MakePlan(model, *speed, {.tokens = 1000, .ranks = ranks});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_GT(choice->plan.predicted.seconds, 0);
    EXPECT_TRUE(std::isfinite(choice->plan.predicted.seconds));
  }
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
  } cases[] = {
      {8, 2, one, 4}, {5, 3, one, 1}, {128, 8, 2 * one, 8}, {256, 8, 4 * one, 8}, {512, 4, 4 * one, 32}};
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

}  // namespace
}  // namespace meshfill
