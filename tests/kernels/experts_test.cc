// The MLP of experts on the CPU, on 1 to 3 threads, against the reference on the same random inputs.
#include "kernels/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

// Rows in memory of their own, poisoned.
struct OwnRows {
  OwnRows(const RouterRule& rule, int64_t tokens)
      : memory(DType::kF32, ExpertRowsBytes(rule.experts, rule.used, tokens) / 4),
        rows(ExpertRowsIn(memory.data(), rule.experts, rule.used, tokens)) {}
  Tensor memory;
  ExpertRows rows;
};

RouterRule RandomRule(std::mt19937_64& random) {
  RouterRule rule;
  rule.score = Draw(random, 0, 1) == 0 ? RouterScore::kSoftmax : RouterScore::kSigmoid;
  rule.groups = static_cast<int>(Draw(random, 0, 1) == 0 ? 1 : Draw(random, 2, 5));
  const int of_group = static_cast<int>(Draw(random, rule.groups == 1 ? 1 : 2, 20));
  rule.experts = rule.groups * of_group;
  rule.used_groups = static_cast<int>(Draw(random, 1, rule.groups));
  rule.used = static_cast<int>(Draw(random, 1, std::min(8, of_group * rule.used_groups)));
  rule.normalised = Draw(random, 0, 1) == 1;
  rule.scale = Draw(random, 0, 1) == 1 ? 1.0f : 2.5f;
  return rule;
}

int ExpertOf(const ExpertRows& rows, const RouterRule& rule, int64_t token, int i) {
  const int32_t row = rows.row[token * rule.used + i];
  return static_cast<int>(std::upper_bound(rows.begin, rows.begin + rule.experts + 1, row) - rows.begin - 1);
}

class ExpertsTest : public testing::TestWithParam<DType> {
 protected:
  template <typename Body>
  void ForRandomDraws(int draws, const Body& body) {
    for (int draw = 0; draw < draws; ++draw) {
      const uint64_t seed = TestSeed();
      SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
      std::mt19937_64 random(seed);
      const LoneStream cpu(MakeCpuDevice(GetParam(), static_cast<int>(Draw(random, 1, 3))));
      const LoneStream reference = ReferenceStream(GetParam());
      body(cpu, reference, random);
      if (HasFatalFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, ExpertsTest, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& param) { return DTypeName(param.param); });

// No token is dropped, none comes twice, and the rows are sorted by expert, then by token.
TEST_P(ExpertsTest, RowsAreAPermutationSortedByExpert) {
  ForRandomDraws(30, [&](const LoneStream& cpu, const LoneStream&, std::mt19937_64& random) {
    const RouterRule rule = RandomRule(random);
    const int64_t tokens = Draw(random, 0, 500);
    const Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts);
    OwnRows own(rule, tokens);
    const ExpertRows& rows = own.rows;
    ASSERT_TRUE(
        cpu->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = rows}).ok());
    ASSERT_TRUE(own.memory.GuardIntact());
    ASSERT_EQ(rows.begin[0], 0);
    ASSERT_EQ(rows.begin[rule.experts], tokens * rule.used);
    std::vector<int> seen(tokens * rule.used, 0);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int i = 0; i < rule.used; ++i) {
        const int32_t row = rows.row[token * rule.used + i];
        ASSERT_TRUE(row >= 0 && row < tokens * rule.used);
        ++seen[row];
        ASSERT_EQ(rows.token[row], token);
        if (i > 0) {
          ASSERT_LT(ExpertOf(rows, rule, token, i - 1), ExpertOf(rows, rule, token, i));
        }
      }
    }
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
    for (int expert = 0; expert < rule.experts; ++expert) {
      ASSERT_LE(rows.begin[expert], rows.begin[expert + 1]);
      EXPECT_TRUE(std::is_sorted(rows.token + rows.begin[expert], rows.token + rows.begin[expert + 1]));
    }
  });
}

TEST_P(ExpertsTest, ChoosesAsTheReference) {
  ForRandomDraws(30, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    const RouterRule rule = RandomRule(random);
    const int64_t tokens = Draw(random, 1, 300);
    const Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts, 2);
    Tensor nudged = logits;  // where a nudge changes the choice, a rounding may
    const Tensor noise = Tensor::Normal(random, DType::kF32, logits.count(), 1e-4f);
    for (int64_t i = 0; i < logits.count(); ++i) nudged.Set(i, logits.At(i) + noise.At(i));
    const Tensor correction = Tensor::Normal(random, DType::kF32, rule.experts, 0.2f);
    RouteArgs args = {.logits = logits.data<float>(),
                      .correction = Draw(random, 0, 1) == 1 ? correction.data<float>() : nullptr,
                      .tokens = tokens,
                      .rule = rule};
    OwnRows got(rule, tokens), expected(rule, tokens), near(rule, tokens);
    args.rows = got.rows;
    ASSERT_TRUE(cpu->Route(args).ok());
    args.rows = expected.rows;
    ASSERT_TRUE(reference->Route(args).ok());
    args.rows = near.rows;
    args.logits = nudged.data<float>();
    ASSERT_TRUE(reference->Route(args).ok());
    int64_t compared = 0;
    for (int64_t token = 0; token < tokens; ++token) {
      bool firm = true;
      for (int i = 0; i < rule.used; ++i) {
        firm &= ExpertOf(expected.rows, rule, token, i) == ExpertOf(near.rows, rule, token, i);
      }
      if (!firm) continue;
      ++compared;
      for (int i = 0; i < rule.used; ++i) {
        ASSERT_EQ(ExpertOf(got.rows, rule, token, i), ExpertOf(expected.rows, rule, token, i));
        const float weight = expected.rows.weight[token * rule.used + i];
        EXPECT_NEAR(got.rows.weight[token * rule.used + i], weight, 1e-5 * std::abs(weight) + 1e-7);
      }
    }
    EXPECT_GE(compared, tokens * 9 / 10);
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

// Some experts get everything, some nothing.
TEST_P(ExpertsTest, MultipliesEachExpertsRows) {
  ForRandomDraws(15, [&](const LoneStream& cpu, const LoneStream& reference, std::mt19937_64& random) {
    RouterRule rule = RandomRule(random);
    const int64_t tokens = Draw(random, 0, 300), in = Draw(random, 1, 120), out = Draw(random, 1, 90);
    Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts);
    for (int64_t token = 0; token < tokens;
         ++token) {  // the first is everyone's favourite, the last nobody's
      logits.Set(token * rule.experts, 20);
      if (rule.experts > rule.used) logits.Set((token + 1) * rule.experts - 1, -20);
    }
    rule.groups = rule.used_groups = 1;
    OwnRows own(rule, tokens);
    ASSERT_TRUE(
        reference->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows})
            .ok());
    const bool biased = Draw(random, 0, 1) == 1;
    std::vector<Tensor> weights, biases;
    std::vector<std::unique_ptr<PackedWeight>> packed, packed_reference;
    for (int expert = 0; expert < rule.experts; ++expert) {
      weights.push_back(Tensor::Normal(random, GetParam(), out * in));
      biases.push_back(Tensor::Normal(random, DType::kF32, out));
      const WeightRows rows = {.data = weights.back().data(),
                               .dtype = GetParam(),
                               .rows = out,
                               .bias = biased ? biases.back().data<float>() : nullptr};
      auto mine = cpu.device().PackWeight({&rows, 1}, in),
           theirs = reference.device().PackWeight({&rows, 1}, in);
      ASSERT_TRUE(mine.ok() && theirs.ok());
      packed.push_back(*std::move(mine));
      packed_reference.push_back(*std::move(theirs));
    }
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
      args.weights = packed_reference;
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
