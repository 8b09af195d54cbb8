// The CUDA kernels of an MLP of experts as they are, on an emulated CTA, against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/expert_gemm.cuh"
#include "kernels/cuda/expert_kernels.cuh"
#include "tests/kernels/cuda_emulator.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_draws.h"
#include "tests/kernels/random_experts.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

using Kernels = ExpertKernels<EmulatedMachine>;

class CudaExpertKernelsTest : public RandomDraws {
 protected:
  // In a grid of a few CTAs that run in any order, whatever there is to do.
  void Run(const std::function<void()>& kernel) {
    std::vector<uint32_t> blocks(Draw(1, 3));
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random_);
    for (const uint32_t block : blocks) {
      EmulatedCta cta(kLayerThreads, block, static_cast<uint32_t>(blocks.size()), Kernels::kSortSharedBytes,
                      random_());
      ASSERT_EQ(cta.Run(kernel), "");
    }
  }

  void Route(const RouteArgs& args) {
    Run([&] { Kernels::Choose(args); });
    Run([&] { Kernels::Sort(args, EmulatedCta::kSharedBase); });
    Run([&] { Kernels::Place(args); });
  }

  // The experts' rows of random logits, by the reference.
  void ReferenceRoute(const RouterRule& rule, int64_t tokens, const Tensor& logits, OwnRows& own) {
    ASSERT_TRUE(
        reference_->Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = own.rows})
            .ok());
  }

  const LoneStream reference_ = ReferenceStream(DType::kBf16);
};

TEST_F(CudaExpertKernelsTest, RoutesAsTheReference) {
  ForRandomDraws(8, [&] {
    const RandomRoute route(random_, *reference_, 80);
    OwnRows got(route.rule, route.tokens);
    Route(route.Args(got.rows));
    ExpectSortedRows(got, route.rule, route.tokens);
    if (!HasFatalFailure()) route.ExpectSameChoice(got);
  });
}

TEST_F(CudaExpertKernelsTest, CountsEachExpertsTokens) {
  ForRandomDraws(5, [&] {
    const RandomRoute route(random_, *reference_, 80);
    OwnRows rows(route.rule, route.tokens);
    OwnCounters counters(route.rule);
    RouteArgs args = route.Args(rows.rows);
    args.tokens_per_expert = counters.counts.data();
    for (int times = 1; times <= 2; ++times) {
      Route(args);
      counters.ExpectTokensOf(rows, route.rule, route.tokens, times);
    }
  });
}

// More experts and groups than a warp has lanes; logits of few values, so that many are equal: all goes to
// the lower number, to the row.
TEST_F(CudaExpertKernelsTest, TiesGoToTheLowerNumber) {
  ForRandomDraws(5, [&] {
    RouterRule rule = RandomRule(random_);
    if (Draw(0, 1) == 1) {
      const int of_group = static_cast<int>(Draw(2, 5));
      rule.groups = static_cast<int>(Draw(30, 90));
      rule.experts = rule.groups * of_group;
      rule.used_groups = static_cast<int>(Draw(1, rule.groups));
      rule.used = static_cast<int>(Draw(1, std::min(33, of_group * rule.used_groups)));
    }
    const int64_t tokens = Draw(1, 12);
    Tensor logits(DType::kF32, tokens * rule.experts);
    for (int64_t i = 0; i < logits.count(); ++i) logits.Set(i, static_cast<float>(Draw(-1, 1)));
    OwnRows got(rule, tokens), expected(rule, tokens);
    ReferenceRoute(rule, tokens, logits, expected);
    Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = got.rows});
    ExpectSortedRows(got, rule, tokens);
    for (int64_t i = 0; i < tokens * rule.used; ++i) {
      ASSERT_EQ(got.rows.row[i], expected.rows.row[i]) << i;
      EXPECT_NEAR(got.rows.weight[i], expected.rows.weight[i], 1e-5 * std::abs(expected.rows.weight[i]));
    }
  });
}

// Whatever the logits are, the rows are those of `used` experts.
TEST_F(CudaExpertKernelsTest, NoNumberLeadsOutside) {
  ForRandomDraws(5, [&] {
    const RouterRule rule = RandomRule(random_);
    const int64_t tokens = Draw(1, 20);
    Tensor logits = Tensor::Normal(random_, DType::kF32, tokens * rule.experts);
    for (int64_t i = 0; i < logits.count(); ++i) {
      if (Draw(0, 2) == 0) logits.Set(i, std::vector{NAN, INFINITY, -INFINITY, 3e38f}[Draw(0, 3)]);
    }
    OwnRows got(rule, tokens);
    Route({.logits = logits.data<float>(), .tokens = tokens, .rule = rule, .rows = got.rows});
    ExpectSortedRows(got, rule, tokens);
  });
}

TEST_F(CudaExpertKernelsTest, NoTokensLeaveEveryExpertEmpty) {
  const RouterRule rule = {.experts = 5, .used = 2};
  OwnRows got(rule, 0);
  Run([&] { Kernels::Sort({.tokens = 0, .rule = rule, .rows = got.rows}, EmulatedCta::kSharedBase); });
  for (int expert = 0; expert <= 5; ++expert) EXPECT_EQ(got.rows.begin[expert], 0);
}

TEST_F(CudaExpertKernelsTest, AddsWhatTheExpertsSay) {
  ForRandomDraws(8, [&] {
    const RouterRule rule = RandomRule(random_);
    const bool vectors = Draw(0, 1) == 1;
    const int64_t tokens = Draw(0, 30), width = vectors ? 4 * Draw(1, 300) : Draw(1, 700);
    OwnRows own(rule, tokens);
    ReferenceRoute(rule, tokens, Tensor::Normal(random_, DType::kF32, tokens * rule.experts), own);
    const Tensor y = Tensor::Normal(random_, DType::kBf16, tokens * rule.used * width);
    Tensor got = Tensor::Normal(random_, DType::kF32, tokens * width), expected = got;
    AddExpertsArgs args{.y = y.data(),
                        .rows = own.rows,
                        .tokens = tokens,
                        .used = rule.used,
                        .width = width,
                        .x = got.data<float>()};
    Run([&] { vectors ? Kernels::AddExperts<4>(args) : Kernels::AddExperts<1>(args); });
    args.x = expected.data<float>();
    ASSERT_TRUE(reference_->AddExperts(args).ok());
    ExpectClose(got, expected, 1e-5);
  });
}

// Tiles that are ragged in rows, columns and depth, more experts than a warp has lanes, and CTAs too many.
TEST_F(CudaExpertKernelsTest, MultipliesEachExpertsRows) {
  using Config = ExpertGemmConfig;
  int draw = 0;
  ForRandomDraws(4, [&] {
    const bool vectors = draw % 2 == 1, by_token = draw / 2 % 2 == 1;
    ++draw;
    RouterRule rule = RandomRule(random_);
    rule.groups = rule.used_groups = 1;
    rule.used = std::min(rule.used, 3);
    const int64_t tokens = Draw(0, 200), out = Draw(0, 1) == 0 ? Draw(1, 200) : 2 * Draw(1, 100);
    const int64_t in = vectors ? 8 * Draw(1, 40) : Draw(1, 200);
    const Tensor logits = UnevenLogits(random_, rule, tokens);
    OwnRows own(rule, tokens);
    ReferenceRoute(rule, tokens, logits, own);
    const RandomExperts experts(random_, reference_.device(), DType::kBf16, rule.experts, out, in);
    std::vector<ExpertMatrix> matrices;
    for (const WeightRows& rows : experts.rows()) {
      matrices.push_back({static_cast<const BFloat16*>(rows.data), rows.bias});
    }
    const int64_t rows = tokens * rule.used;
    const Tensor x = Tensor::Normal(random_, DType::kBf16, (by_token ? tokens : rows) * in);
    Tensor got(DType::kBf16, rows * out), expected = got;
    const ExpertProducts products{.experts = matrices.data(),
                                  .count = rule.experts,
                                  .in_features = in,
                                  .out_features = out,
                                  .begin = own.rows.begin,
                                  .token = by_token ? own.rows.token : nullptr,
                                  .x = x.data<BFloat16>(),
                                  .y = got.data<BFloat16>()};
    const auto blocks =
        static_cast<uint32_t>(Config::MostRowTiles(rows, rule.experts) * Config::ColumnTiles(out));
    for (uint32_t block = 0; block < blocks; ++block) {
      EmulatedCta cta(Config::kThreads, block, blocks, Config::kSharedBytes, random_());
      ASSERT_EQ(cta.Run([&] {
        if (vectors) {
          Sm80ExpertGemm<EmulatedMachine, BFloat16, true>::Run(products, EmulatedCta::kSharedBase);
        } else {
          Sm80ExpertGemm<EmulatedMachine, BFloat16, false>::Run(products, EmulatedCta::kSharedBase);
        }
      }),
                "");
    }
    MultiplyRowByRow(*reference_, {.weights = experts.packed(),
                                   .rows = own.rows,
                                   .row_count = rows,
                                   .by_token = by_token,
                                   .x = x.data(),
                                   .y = expected.data()});
    ExpectClose(got, expected, 1e-4);
  });
}

}  // namespace
}  // namespace meshfill
