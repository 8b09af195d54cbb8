#include "engine/plan/speed_correction.h"

#include <limits>
#include <thread>
#include <vector>

#include "engine/plan/planner.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

PlanChoice SomeChoice() {
  const ModelShape model{.layers = 2,
                         .hidden = 64,
                         .intermediate = 128,
                         .q_heads = 4,
                         .kv_heads = 4,
                         .head_dim = 16,
                         .vocab = 100,
                         .context_tokens = 1 << 20,
                         .dtype = DType::kBf16};
  auto choice = MakePlan(model, {}, {.tokens = 1000, .ranks = 4});
  EXPECT_TRUE(choice.ok()) << choice.status();
  return *std::move(choice);
}

TEST(SpeedCorrection, FollowsWhatPrefillsTake) {
  SpeedCorrection correction;
  EXPECT_EQ(correction.factor(), 1);
  // A pool that is 1.5 times as slow as predicted: each prediction is corrected, each prefill the same.
  for (int prefill = 0; prefill < 40; ++prefill) correction.Observe(2 * correction.factor(), 3);
  EXPECT_NEAR(correction.factor(), 1.5, 0.01);
  for (int prefill = 0; prefill < 40; ++prefill) correction.Observe(2 * correction.factor(), 2);
  EXPECT_NEAR(correction.factor(), 1, 0.01);
}

TEST(SpeedCorrection, OneOutlierMovesItLittle) {
  SpeedCorrection correction;
  correction.Observe(1, 1e6);
  EXPECT_LT(correction.factor(), 1.2);
  correction.Observe(1, 1e-6);
  EXPECT_NEAR(correction.factor(), 1, 1e-9);
}

TEST(SpeedCorrection, StaysWithinItsBounds) {
  SpeedCorrection correction;
  for (int i = 0; i < 1000; ++i) correction.Observe(1, 100);
  EXPECT_EQ(correction.factor(), SpeedCorrection::kMostFactor);
  for (int i = 0; i < 1000; ++i) correction.Observe(100, 1);
  EXPECT_EQ(correction.factor(), 1 / SpeedCorrection::kMostFactor);
}

TEST(SpeedCorrection, IgnoresSecondsThatAreNone) {
  SpeedCorrection correction;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double none : {0.0, -1.0, nan}) {
    correction.Observe(none, 1);
    correction.Observe(1, none);
  }
  EXPECT_EQ(correction.factor(), 1);
}

TEST(SpeedCorrection, ScalesSecondsAndNothingElse) {
  SpeedCorrection correction;
  for (int i = 0; i < 5; ++i) correction.Observe(1, 1.7);
  PlanChoice before = SomeChoice();
  before.pieces = {before.plan};
  PlanChoice after = before;
  correction.Apply(after);
  const double factor = correction.factor();
  const auto expect_scaled = [factor](const Prediction& scaled, const Prediction& plain) {
    EXPECT_DOUBLE_EQ(scaled.compute_seconds, plain.compute_seconds * factor);
    EXPECT_DOUBLE_EQ(scaled.comm_wait_seconds, plain.comm_wait_seconds * factor);
    EXPECT_DOUBLE_EQ(scaled.seconds, scaled.compute_seconds + scaled.comm_wait_seconds);
    EXPECT_EQ(scaled.comm_bytes.total(), plain.comm_bytes.total());
    EXPECT_EQ(scaled.peak_bytes, plain.peak_bytes);
  };
  expect_scaled(after.plan.predicted, before.plan.predicted);
  expect_scaled(after.pieces.at(0).predicted, before.plan.predicted);
  ASSERT_EQ(after.candidates.size(), before.candidates.size());
  for (size_t i = 0; i < after.candidates.size(); ++i) {
    EXPECT_EQ(after.candidates[i].tile, before.candidates[i].tile);
    expect_scaled(after.candidates[i].predicted, before.candidates[i].predicted);
  }
}

TEST(SpeedCorrection, IsSafeOnAnyThread) {
  SpeedCorrection correction;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&correction] {
      for (int prefill = 0; prefill < 1000; ++prefill) correction.Observe(2 * correction.factor(), 3);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NEAR(correction.factor(), 1.5, 0.3);
}

}  // namespace
}  // namespace meshfill
