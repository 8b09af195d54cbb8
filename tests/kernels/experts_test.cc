// The MLP of experts on the CPU, on 1 to 3 threads, against the reference on the same random inputs.
#include "kernels/experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_experts.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

class ExpertsTest : public testing::TestWithParam<DType> {
 protected:
  template <typename Body>
  void ForRandomDraws(int draws, const Body& body) {
    const uint64_t seed = TestSeed();
    for (int draw = 0; draw < draws; ++draw) {
      SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
      std::mt19937_64 random(seed + draw);
      const LoneStream cpu(MakeCpuDevice(GetParam(), static_cast<int>(Draw(random, 1, 3))));
      const LoneStream reference = ReferenceStream(GetParam());
      body(cpu, reference, random);
      if (HasFatalFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, ExpertsTest, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& param) { return DTypeName(param.param); });

TEST_P(ExpertsTest, RowsAreAPermutationSortedByExpert) {
  ForRandomDraws(30, [&](const LoneStream& cpu, const LoneStream&, std::mt19937_64& random) {
    const RouterRule rule = RandomRule(random);
    const int64_t tokens = Draw(random, 0, 500);
    const Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts);
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        cpu->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows}).ok());
    ExpectSortedRows(own, rule, tokens);
  });
}

TEST_P(ExpertsTest, ChoosesAsTheReference) {
  ForRandomDraws(30, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    const RandomRoute route(random, *reference, 300);
    OwnRows got(route.rule, route.tokens);
    ASSERT_TRUE(cpu->Route(route.Args(got.rows)).ok());
    route.ExpectSameChoice(got);
  });
}

TEST_P(ExpertsTest, CountsEachExpertsTokens) {
  ForRandomDraws(30, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    const RandomRoute route(random, *reference, 300);
    for (const LoneStream* stream : {&cpu, &reference}) {
      OwnRows rows(route.rule, route.tokens);
      OwnCounters counters(route.rule);
      RouteArgs args = route.Args(rows.rows);
      args.tokens_per_expert = counters.counts.data();
      for (int times = 1; times <= 3; ++times) {
        ASSERT_TRUE((*stream)->Route(args).ok());
        counters.ExpectTokensOf(rows, route.rule, route.tokens, times);
      }
    }
  });
}

// Equal scores: the lower number.
TEST_P(ExpertsTest, TiesGoToTheLowerNumber) {
  const LoneStream cpu(MakeCpuDevice(GetParam(), 1)), reference = ReferenceStream(GetParam());
  const RouterRule rule = {.experts = 6, .used = 3};
  const std::vector<float> logits = {1, 2, 1, 1, 2, 1};
  for (const LoneStream* stream : {&cpu, &reference}) {
    OwnRows own(rule, 1);
    ASSERT_TRUE(
        (*stream)->Route({.logits = logits.data(), .tokens = 1, .rule = rule, .rows = own.rows}).ok());
    EXPECT_EQ(ExpertOf(own.rows, rule, 0, 0), 0);
    EXPECT_EQ(ExpertOf(own.rows, rule, 0, 1), 1);
    EXPECT_EQ(ExpertOf(own.rows, rule, 0, 2), 4);
  }
}

// Logits whose exponentials are above f32's largest number.
TEST_P(ExpertsTest, LargeLogitsAreMeasuredFromTheLargest) {
  const LoneStream cpu(MakeCpuDevice(GetParam(), 1));
  const RouterRule rule = {.experts = 4, .used = 2};
  const std::vector<float> logits = {200, 201, 150, 199};
  OwnRows own(rule, 1);
  ASSERT_TRUE(cpu->Route({.logits = logits.data(), .tokens = 1, .rule = rule, .rows = own.rows}).ok());
  const double sum = std::exp(-1.0) + 1 + std::exp(-2.0);
  EXPECT_EQ(ExpertOf(own.rows, rule, 0, 0), 0);
  EXPECT_NEAR(own.rows.weight[0], std::exp(-1.0) / sum, 1e-6);
  EXPECT_EQ(ExpertOf(own.rows, rule, 0, 1), 1);
  EXPECT_NEAR(own.rows.weight[1], 1 / sum, 1e-6);
}

// What is no number is chosen last, and whatever the logits are, the rows are those of `used` experts.
TEST_P(ExpertsTest, NaNIsNotChosenBeforeANumber) {
  const LoneStream cpu(MakeCpuDevice(GetParam(), 1));
  const RouterRule rule = {.score = RouterScore::kSigmoid, .experts = 4, .used = 2};
  const std::vector<float> logits = {NAN, 1, NAN, -1};
  OwnRows own(rule, 1);
  ASSERT_TRUE(cpu->Route({.logits = logits.data(), .tokens = 1, .rule = rule, .rows = own.rows}).ok());
  EXPECT_EQ(ExpertOf(own.rows, rule, 0, 0), 1);
  EXPECT_EQ(ExpertOf(own.rows, rule, 0, 1), 3);
  ForRandomDraws(10, [&](const LoneStream& cpu, const LoneStream&, std::mt19937_64& random) {
    const RouterRule rule = RandomRule(random);
    const int64_t tokens = Draw(random, 1, 20);
    Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts);
    for (int64_t i = 0; i < logits.count(); ++i) {
      if (Draw(random, 0, 2) == 0) {
        logits.Set(i, std::vector{NAN, INFINITY, -INFINITY, 3e38f}[Draw(random, 0, 3)]);
      }
    }
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        cpu->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows}).ok());
    ExpectSortedRows(own, rule, tokens);
  });
}

TEST_P(ExpertsTest, MultipliesEachExpertsRows) {
  ForRandomDraws(15, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    RouterRule rule = RandomRule(random);
    rule.groups = rule.used_groups = 1;
    const int64_t tokens = Draw(random, 0, 300), in = Draw(random, 1, Draw(random, 0, 4) == 0 ? 1100 : 120);
    const int64_t out = Draw(random, 1, 90);
    const Tensor logits = UnevenLogits(random, rule, tokens);
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        reference->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows})
            .ok());
    const RandomExperts experts(random, reference.device(), GetParam(), rule.experts, out, in);
    const std::vector<std::unique_ptr<PackedWeight>> packed = experts.PackedOn(cpu.device());
    for (const bool by_token : {true, false}) {
      const int64_t row_count = tokens * rule.used;
      const Tensor x = Tensor::Normal(random, GetParam(), (by_token ? tokens : row_count) * in);
      Tensor y(GetParam(), row_count * out), expected = y;
      ExpertGemmArgs args = {.weights = packed,
                             .rows = own.rows,
                             .row_count = row_count,
                             .by_token = by_token,
                             .x = x.data(),
                             .y = y.data()};
      ASSERT_TRUE(cpu->ExpertGemm(args).ok());
      args.weights = experts.packed();
      args.y = expected.data();
      ASSERT_TRUE(reference->ExpertGemm(args).ok());
      EXPECT_TRUE(y.GuardIntact());
      ExpectClose(y, expected, 1e-4);
    }
  });
}

TEST_P(ExpertsTest, AddsWhatTheExpertsSay) {
  ForRandomDraws(15, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    const RouterRule rule = RandomRule(random);
    const int64_t tokens = Draw(random, 0, 300), width = Draw(random, 1, 300);
    const Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts);
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        reference->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows})
            .ok());
    const Tensor y = Tensor::Normal(random, GetParam(), tokens * rule.used * width);
    Tensor x = Tensor::Normal(random, DType::kF32, tokens * width), expected = x;
    for (auto [stream, sum] : {std::pair(&cpu, &x), {&reference, &expected}}) {
      ASSERT_TRUE((*stream)
                      ->AddExperts({.y = y.data(),
                                    .rows = own.rows,
                                    .tokens = tokens,
                                    .used = rule.used,
                                    .width = width,
                                    .x = sum->data<float>()})
                      .ok());
    }
    ExpectClose(x, expected, 1e-5);
  });
}

TEST_P(ExpertsTest, StopsWhenAsked) {
  StopToken stop;
  stop.Stop();
  const LoneStream cpu(MakeCpuDevice(GetParam(), 1), &stop);
  const RouterRule rule = {.experts = 4, .used = 2};
  const std::vector<float> logits(4 * 100, 0.0f);
  OwnRows own(rule, 100);
  EXPECT_EQ(cpu->Route({.logits = logits.data(), .tokens = 100, .rule = rule, .rows = own.rows}).code(),
            absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace meshfill
