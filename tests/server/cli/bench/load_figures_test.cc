// Figures of random loads against plain definitions of the same.
#include "server/cli/bench/load_figures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

const std::vector<LoadClass> kClasses = {{.tokens = 1024, .share = 0.9, .lone_seconds = 0.02},
                                         {.tokens = 16384, .share = 0.09, .lone_seconds = 0.7},
                                         {.tokens = 131072, .share = 0.01, .lone_seconds = 20}};

double LoneSeconds(int64_t tokens) {
  for (const LoadClass& each : kClasses) {
    if (each.tokens == tokens) return each.lone_seconds;
  }
  return 0;
}

TEST(LoadFigures, PromptsComeAsOftenAsTheyShould) {
  const uint64_t seed = TestSeed();
  constexpr double kSeconds = 100000, kLoad = 0.8;
  const double mean_seconds = 0.9 * 0.02 + 0.09 * 0.7 + 0.01 * 20;
  const std::vector<LoadPrompt> prompts = PoissonPrompts(kClasses, kLoad, kSeconds, seed);
  const double count = static_cast<double>(prompts.size());
  const double expected = kSeconds * kLoad / mean_seconds;  // some 285,000: 8 standard deviations are 1.5 %
  EXPECT_NEAR(count, expected, 0.015 * expected);
  std::map<int64_t, double> of_length;
  std::map<std::string, double> of_tenant;
  double at_once = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    ++of_length[prompts[i].tokens];
    ++of_tenant[prompts[i].tenant];
    if (i == 0) continue;
    ASSERT_GE(prompts[i].due_seconds, prompts[i - 1].due_seconds);
    if (prompts[i].due_seconds - prompts[i - 1].due_seconds < kSeconds / expected) ++at_once;
  }
  EXPECT_GE(prompts.front().due_seconds, 0);
  EXPECT_LT(prompts.back().due_seconds, kSeconds);
  for (const LoadClass& each : kClasses) EXPECT_NEAR(of_length[each.tokens] / count, each.share, 0.006);
  EXPECT_NEAR(of_tenant["a"] / count, 0.5, 0.01);
  EXPECT_EQ(of_tenant.size(), 2u);
  EXPECT_NEAR(at_once / count, 1 - std::exp(-1), 0.01) << "the gaps are not those of a Poisson process";
  const std::vector<LoadPrompt> again = PoissonPrompts(kClasses, kLoad, kSeconds, seed);
  ASSERT_EQ(again.size(), prompts.size());
  EXPECT_EQ(again.back().due_seconds, prompts.back().due_seconds);
}

// Each begins when all that came before it have ended.
TEST(LoadFigures, FirstComeFirstServedKeepsTheOrder) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    const auto prompts = PoissonPrompts(kClasses, 0.5 + 0.1 * Draw(random, 0, 8), 300, random());
    const std::vector<double> latencies = FirstComeFirstServed(prompts, kClasses);
    ASSERT_EQ(latencies.size(), prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      // The end is the latest of: any earlier one's coming, and all work from there on.
      double work = 0, end = 0;
      for (size_t from = i + 1; from-- > 0;) {
        work += LoneSeconds(prompts[from].tokens);
        end = std::max(end, prompts[from].due_seconds + work);
      }
      ASSERT_NEAR(latencies[i], end - prompts[i].due_seconds, 1e-6);
    }
  }
}

TEST(LoadFigures, PercentilesAreValuesThatSoManyDoNotExceed) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    std::vector<double> values(Draw(random, 1, 60));
    for (double& each : values) each = static_cast<double>(Draw(random, 0, 20));
    const double share = static_cast<double>(Draw(random, 0, 100)) / 100;
    const double value = Percentile(values, share);
    const auto at_most = [&](double bound) {
      return static_cast<double>(
          std::count_if(values.begin(), values.end(), [&](double each) { return each <= bound; }));
    };
    const double size = static_cast<double>(values.size());
    EXPECT_GE(at_most(value), share * size - 1e-9);
    EXPECT_NE(std::find(values.begin(), values.end(), value), values.end());
    for (const double each : values) {
      if (each < value) {
        EXPECT_LT(at_most(each), share * size + 1e-9);
      }
    }
  }
}

TEST(LoadFigures, AShareIsCountedWhileBothHaveSome) {
  EXPECT_EQ(ShareOf({}, {1, 2}, 0.5), 0);
  EXPECT_EQ(ShareOf({3, 1, 2, 40}, {0.5, 3, 3.5, 39}, 0.75), 0.6) << "until 3";
  EXPECT_EQ(ShareOf({3, 1, 2, 40}, {0.5, 3, 3.5, 39}, 1), 0.5) << "until 40";
  EXPECT_EQ(ShareOf({1, 2}, {}, 0.5), 1);
}

TEST(LoadFigures, PredictionsAreJudgedByWhatCame) {
  std::vector<PredictedTime> times;
  for (int i = 0; i < 300; ++i) {
    // 8 % too low at first, right, 8 % too high at last; one in ten is twice too high.
    const double bias = i < 100 ? 0.92 : i < 200 ? 1 : 1.08;
    times.push_back({.predicted_seconds = 3 * (i % 10 == 9 ? 2 : bias), .real_seconds = 3});
  }
  const PredictionFigures figures = FiguresOf(times);
  EXPECT_NEAR(figures.median_error, 0.08, 1e-9);
  EXPECT_NEAR(figures.p95_error, 1, 1e-9);
  EXPECT_NEAR(figures.bias, 0, 1e-9);
  EXPECT_NEAR(figures.drift, 1.08 / 0.92 - 1, 1e-9);
  std::reverse(times.begin(), times.end());
  EXPECT_NEAR(FiguresOf(times).drift, 1.08 / 0.92 - 1, 1e-9) << "down is as bad as up";
  EXPECT_EQ(FiguresOf({times.data(), 1}).drift, 0);
}

TEST(LoadFigures, ChecksHoldTheirBounds) {
  EXPECT_TRUE((LoadCheck{.name = "", .value = 2, .at_least = 2, .at_most = {}}).met());
  EXPECT_FALSE((LoadCheck{.name = "", .value = 1.9, .at_least = 2, .at_most = {}}).met());
  EXPECT_TRUE((LoadCheck{.name = "", .value = 2, .at_least = {}, .at_most = 2}).met());
  EXPECT_FALSE((LoadCheck{.name = "", .value = 2.1, .at_least = {}, .at_most = 2}).met());
}

}  // namespace
}  // namespace meshfill
