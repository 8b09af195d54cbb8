// The MLP of experts on the CPU, on 1 to 3 threads, against the reference on the same random inputs.
#include "kernels/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/onednn.h"
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

// Tiles that are whole and not, of one row and of many, products that are sums of several blocks, and weights
// that are kept narrow.
TEST_P(ExpertsTest, PutsEachExpertsRowsThroughItsMlp) {
  ForRandomDraws(20, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    RouterRule rule = RandomRule(random);
    rule.groups = rule.used_groups = 1;
    const bool large = Draw(random, 0, 3) == 0;
    if (large) rule.experts = std::min(rule.experts, 4);
    rule.used = std::min(rule.used, rule.experts);
    const int64_t tokens = Draw(random, 0, large ? 15 : 300);
    const int64_t hidden = large ? Draw(random, 500, 1100) : Draw(random, 1, 90);
    const int64_t width = large ? Draw(random, 400, 700) : Draw(random, 1, 60);
    const Tensor logits = UnevenLogits(random, rule, tokens);
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        reference->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows})
            .ok());
    const auto dtype = [&] { return Draw(random, 0, 3) == 0 ? DType::kF8E4M3 : GetParam(); };
    RandomExpertMlps mlps(random, *reference, rule, tokens, own.rows, hidden, width, dtype(), dtype());
    const auto gate_up = mlps.GateUpOn(cpu.device()), down = mlps.DownOn(cpu.device());
    ASSERT_TRUE(cpu->ExpertMlp(mlps.Args(gate_up, down, own.rows)).ok());
    EXPECT_TRUE(mlps.narrow.GuardIntact());
    mlps.ExpectAgrees(mlps.y);
  });
}

// More rows than a tile has. A row's bits are those that it has alone.
TEST_P(ExpertsTest, ARowsBitsDoNotDependOnItsNeighbours) {
  if (!OneDnnSumsRowsAlike(GetParam())) GTEST_SKIP() << "only AVX-512 promises this";
  ForRandomDraws(3, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    const RouterRule rule = {.experts = 3, .used = 2};
    const int64_t tokens = Draw(random, 900, 1700), hidden = Draw(random, 1, 90), width = Draw(random, 1, 60);
    const Tensor logits = UnevenLogits(random, rule, tokens);
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        cpu->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows}).ok());
    RandomExpertMlps mlps(random, *reference, rule, tokens, own.rows, hidden, width, GetParam(), GetParam());
    const auto gate_up = mlps.GateUpOn(cpu.device()), down = mlps.DownOn(cpu.device());
    const ExpertMlpArgs args = mlps.Args(gate_up, down, own.rows);
    ASSERT_TRUE(cpu->ExpertMlp(args).ok());
    mlps.ExpectAgrees(mlps.y);
    const Tensor all = mlps.y;
    for (const int64_t row : {int64_t{0}, Draw(random, 0, args.row_count - 1), args.row_count - 1}) {
      int32_t begin[] = {0, 0, 0, 0};
      for (int expert = 0; expert < rule.experts; ++expert) {
        begin[expert + 1] = row < own.rows.begin[expert + 1] ? 1 : 0;
      }
      ExpertMlpArgs alone = args;
      alone.rows = {.begin = begin, .token = own.rows.token + row, .row = nullptr, .weight = nullptr};
      alone.row_count = 1;
      ASSERT_TRUE(cpu->ExpertMlp(alone).ok());
      for (int64_t i = 0; i < hidden; ++i) ASSERT_EQ(mlps.y.At(i), all.At(row * hidden + i)) << row;
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
