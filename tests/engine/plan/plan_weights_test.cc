#include "engine/plan/plan_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "engine/plan/planner.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

const ModelShape kModel = {.layers = 4,
                           .hidden = 64,
                           .intermediate = 128,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .head_dim = 16,
                           .vocab = 100,
                           .context_tokens = 1 << 20};

TEST(PlanWeightsTest, AreCountedOnceForAProcessOfRanks) {
  const PlanWeights process = {.loaded_bytes = 1000, .run_bytes = 301};
  EXPECT_EQ(process.Share(3, 1).loaded_bytes, 3000);
  EXPECT_EQ(process.Share(1, 2).run_bytes, 151);
  EXPECT_EQ(process.Share(1, 2).loaded_bytes, 500);
}

TEST(PlanWeightsTest, ALayerIsWaitedForAsFarAsItsComingTakesLongerThanTheOneBefore) {
  const PlanWeights weights = {.mode = WeightMode::kStreamed,
                               .run_bytes = 10,
                               .layer_seconds = 2,
                               .layer_busy_seconds = 0.5,
                               .head_seconds = 3};
  Prediction slow = {
      .seconds = 40, .compute_seconds = 36, .comm_wait_seconds = 4, .peak_bytes = 7, .run_bytes = 7};
  CountWeights(weights, 4, slow);
  // Hidden, but for the cores that it takes; beside the last layer two thirds of the head.
  EXPECT_EQ(slow.weight_seconds, 2 + 4 * 0.5 + 1);
  EXPECT_EQ(slow.seconds, 45);
  EXPECT_EQ(slow.peak_bytes, 17);
  EXPECT_EQ(slow.run_bytes, 17);
  EXPECT_EQ(slow.weight_bytes, 10);
  EXPECT_EQ(slow.parts, PartSeconds{.products = 5});
  Prediction fast = {.seconds = 4, .compute_seconds = 4};
  CountWeights(weights, 4, fast);
  EXPECT_EQ(fast.weight_seconds, 2 + 4 * 1 + 1);
  Prediction without_head = {.seconds = 4, .compute_seconds = 4};
  CountWeights(weights.WithoutHead(), 4, without_head);
  EXPECT_EQ(without_head.weight_seconds, 2 + 3 * 1);
  Prediction resident = {.seconds = 4, .compute_seconds = 4, .peak_bytes = 7, .run_bytes = 7};
  CountWeights({.loaded_bytes = 90, .layer_seconds = 5}, 4, resident);
  EXPECT_EQ(resident.seconds, 4);
  EXPECT_EQ(resident.peak_bytes, 97);
  EXPECT_EQ(resident.run_bytes, 7);
}

// Each of four workers gathers three quarters of a layer while it computes the one before. While both are on
// their way, the link is theirs by halves.
TEST(PlanWeightsTest, SharedOnesComeByTheLinkBesideTheChunks) {
  const PlanWeights one = {.mode = WeightMode::kSharded,
                           .loaded_bytes = 4400,
                           .run_bytes = 2000,
                           .layer_seconds = 0.4,
                           .layer_busy_seconds = 0.2,
                           .head_seconds = 0.1,
                           .layer_bytes = 1000,
                           .head_bytes = 400};
  EXPECT_EQ(ShareBytes(one, 4), 1100);
  EXPECT_EQ(ShareBytes({.loaded_bytes = 4401}, 4), 1101) << "no byte is left out";
  const PlanWeights shared = SharedAmong(one, 4, {.latency_seconds = 0.25, .bytes_per_second = 1000});
  EXPECT_EQ(shared.loaded_bytes, 4400);
  EXPECT_EQ(shared.run_bytes, 8000);
  EXPECT_EQ(shared.layer_bytes, 750);
  EXPECT_EQ(shared.head_bytes, 300);
  EXPECT_EQ(shared.sent_bytes, 3000 + 100);
  EXPECT_EQ(shared.gather_bytes_per_second, 1000);
  EXPECT_EQ(shared.WithoutHead().sent_bytes, 3000);
  EXPECT_DOUBLE_EQ(shared.layer_seconds, 1.5);
  EXPECT_DOUBLE_EQ(shared.layer_busy_seconds, 0.15);
  EXPECT_DOUBLE_EQ(shared.head_seconds, 1.05);
  // A fast link: the thread that copies is what is waited for.
  EXPECT_DOUBLE_EQ(SharedAmong(one, 4, {.bytes_per_second = 1e9}).layer_seconds, 0.3);
  EXPECT_DOUBLE_EQ(SharedAmong(one, 4, {.bytes_per_second = 1e9}).head_seconds, 0.075);

  // Of each layer's 3 s the link moves chunks for 1. Beside weights they take 2, and still nobody waits.
  Prediction hidden = {.seconds = 12, .compute_seconds = 12};
  hidden.comm_bytes[Traffic::kKv] = 4000;
  CountWeights(shared, 4, hidden);
  EXPECT_DOUBLE_EQ(hidden.weight_seconds, 1.5 + 3 * 0.15 + 0.15 * 1.05 / 1.5);
  EXPECT_EQ(hidden.parts, PartSeconds{.weights = hidden.weight_seconds});
  EXPECT_EQ(hidden.comm_bytes[Traffic::kGather], 3100);
  EXPECT_EQ(hidden.weight_bytes, 12400);
}

// Layers of 2 s beside weights that take 1.5 s.
TEST(PlanWeightsTest, ChunksThatShareTheLinkWithWeightsAreWaitedForLonger) {
  const PlanWeights weights = {
      .mode = WeightMode::kSharded, .layer_seconds = 1.5, .gather_bytes_per_second = 1000};
  const auto added = [&](double compute, double wait, double chunks) {
    Prediction predicted = {.compute_seconds = compute, .comm_wait_seconds = wait};
    predicted.comm_bytes[Traffic::kKv] = static_cast<int64_t>(1000 * chunks);
    CountWeights(weights, 2, predicted);  // one layer's weights come beside another
    return predicted.weight_seconds - 1.5;
  };
  EXPECT_DOUBLE_EQ(added(4, 0, 0), 0);
  // A second of chunks, for which the ranks wait, and a second of computing, in which the link has none, in
  // short turns. Such a layer takes 3 s beside weights, of which 2 s come: three quarters of it are enough.
  EXPECT_DOUBLE_EQ(added(2, 2, 2), 0.75);
  // A link that is never idle takes as much longer as the weights do.
  EXPECT_DOUBLE_EQ(added(0, 4, 4), 1.5);
  EXPECT_DOUBLE_EQ(added(4, 0, 4), 1.5);
  EXPECT_DOUBLE_EQ(added(2, 2, 4), 1.5);
  // Whatever the layer waits for beside the link, the link is free then.
  EXPECT_DOUBLE_EQ(added(2, 2, 0), 0);
}

// Never less than the larger of the layer and of all that is on the link, never more than both one after the
// other.
TEST(PlanWeightsTest, WhatWeightsAddIsWithinWhatTheLinkAllows) {
  std::mt19937_64 random(TestSeed());
  std::uniform_real_distribution<double> seconds(0, 2);
  for (int draw = 0; draw < 1000; ++draw) {
    const PlanWeights weights = {
        .mode = WeightMode::kSharded, .layer_seconds = seconds(random), .gather_bytes_per_second = 1e6};
    Prediction predicted = {.compute_seconds = seconds(random), .comm_wait_seconds = seconds(random)};
    const double layer = predicted.compute_seconds + predicted.comm_wait_seconds;
    const double chunks = std::uniform_real_distribution<double>(0, layer)(random);
    predicted.comm_bytes[Traffic::kKv] = static_cast<int64_t>(1e6 * chunks);
    PlanWeights with_head = weights;  // comes beside the one layer
    with_head.head_seconds = weights.layer_seconds;
    CountWeights(with_head, 1, predicted);
    const double added = predicted.weight_seconds - weights.layer_seconds;
    EXPECT_GE(added, std::max(0.0, weights.layer_seconds + chunks - layer) - 1e-5);
    EXPECT_LE(added, weights.layer_seconds + 1e-9);
  }
}

// Whatever the weights take, the shape is the one that is planned without them in the rest of the memory.
TEST(PlanWeightsTest, ChangeNoChoiceButByTheirMemory) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 200; ++draw) {
    PlanRequest request = {.tokens = Draw<int64_t>(random, 1, 100000), .ranks = Draw(random, 1, 12)};
    request.one_memory = Draw(random, 0, 1) == 1;
    PlanRequest with = request;
    with.weights = {.mode = WeightMode::kStreamed,
                    .run_bytes = Draw<int64_t>(random, 0, 1 << 24),
                    .layer_seconds = std::exponential_distribution(1.0)(random)};
    if (Draw(random, 0, 1) == 1) {
      request.memory_budget_bytes = Draw<int64_t>(random, 1, int64_t{1} << 28);
      with.memory_budget_bytes = request.memory_budget_bytes + with.weights.run_bytes;
    }
    const auto bare = MakePlan(kModel, {}, request), plan = MakePlan(kModel, {}, with);
    ASSERT_EQ(plan.status().code(), bare.status().code()) << plan.status();
    if (!plan.ok()) continue;
    EXPECT_EQ(plan->plan.DebugString(), bare->plan.DebugString());
    EXPECT_EQ(plan->candidates.size(), bare->candidates.size());
    EXPECT_EQ(plan->plan.schedule, bare->plan.schedule);
    EXPECT_EQ(plan->plan.predicted.run_bytes, bare->plan.predicted.run_bytes + with.weights.run_bytes);
    EXPECT_GE(plan->plan.predicted.seconds, bare->plan.predicted.seconds);
  }
}

TEST(PlanWeightsTest, APoolNeedsWhatItsSlowestAndLargestWorkerDoes) {
  const PlanWeights least;
  const PlanWeights most = {.mode = WeightMode::kSharded,
                            .loaded_bytes = 1,
                            .run_bytes = 2,
                            .layer_seconds = 3,
                            .layer_busy_seconds = 4,
                            .head_seconds = 5,
                            .layer_bytes = 6,
                            .head_bytes = 7};
  EXPECT_EQ(MostOf(least, most), most);
  EXPECT_EQ(MostOf(most, least), most);
}

TEST(PlanWeightsTest, RefusesWhatNoWorkerHas) {
  EXPECT_TRUE(CheckPlanWeights({}).ok());
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.layer_seconds = bad})));
    EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.layer_busy_seconds = bad})));
    EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.head_seconds = bad})));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.loaded_bytes = -1})));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.run_bytes = -1})));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.layer_bytes = -1})));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckPlanWeights({.head_bytes = -1})));
}

}  // namespace
}  // namespace meshfill
