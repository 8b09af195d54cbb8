#include "engine/plan/speed_correction.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr double kNoise = 0.1;

const ModelShape kModel{.layers = 2,
                        .hidden = 64,
                        .intermediate = 128,
                        .q_heads = 4,
                        .kv_heads = 4,
                        .head_dim = 16,
                        .vocab = 100,
                        .context_tokens = 1 << 20,
                        .dtype = DType::kBf16};

absl::StatusOr<PlanChoice> PlanOf(const SpeedCorrection& correction, int64_t tokens, int ranks,
                                  const PoolSpeed& speed = {}) {
  return correction.Plan(speed, {}, [&](const PoolSpeed& ranked, const Topology&) {
    return MakePlan(kModel, ranked, {.tokens = tokens, .ranks = ranks});
  });
}

// A pool that is not as fast as its speeds say: each part takes its own factor longer.
class Pool {
 public:
  Pool(const PartFactors& truth, uint64_t seed) : truth_(truth), random_(seed) {}

  // Short ones mostly, as a service has them. Attention grows with the square, half of the transfers hide.
  Prediction Draw() {
    const double tokens = 1000 * std::pow(2.0, std::uniform_int_distribution<int>(0, 7)(random_));
    PartSeconds parts{.products = 10e-6 * tokens,
                      .attention = 0.4e-9 * tokens * tokens,
                      .transfers = 4e-6 * tokens,
                      .weights = 0.05 * std::uniform_int_distribution<int>(0, 1)(random_),
                      .fixed = 5e-3};
    parts.hidden = std::min(0.5 * parts.transfers, parts.attention);
    Prediction predicted;
    predicted.parts = parts;
    return predicted;
  }

  // Exactly, but for noise.
  MeasuredSeconds Run(const PartSeconds& parts, double noise = kNoise) {
    const auto noisy = [&](double seconds) {
      return seconds * std::uniform_real_distribution<double>(1 - noise, 1 + noise)(random_);
    };
    MeasuredSeconds measured;
    measured.attention = noisy(truth_.attention * parts.attention);
    measured.comm_wait =
        noisy(std::max(0.0, truth_.transfers * parts.transfers - truth_.attention * parts.hidden));
    measured.comm_wait += noisy(truth_.weights * parts.weights);
    measured.all = measured.attention + measured.comm_wait + noisy(truth_.products * parts.products) +
                   noisy(parts.fixed + truth_.fixed_seconds);
    return measured;
  }

  double Exactly(const PartSeconds& parts) { return Run(parts, 0).all; }

 private:
  const PartFactors truth_;
  std::mt19937_64 random_;
};

double Predicted(const SpeedCorrection& correction, const PartSeconds& parts) {
  const auto any = [&](const PoolSpeed& speed, const Topology&) {
    static const auto choice = MakePlan(kModel, speed, {.tokens = 100, .ranks = 2});
    PlanChoice same = *choice;
    same.plan.predicted.parts = parts;
    same.plan.predicted.comm_wait_seconds = parts.transfers - parts.hidden;
    same.plan.predicted.seconds =
        parts.products + parts.attention + parts.fixed + parts.transfers - parts.hidden + parts.weights;
    return absl::StatusOr<PlanChoice>(same);
  };
  return correction.Plan({}, {}, any)->plan.predicted.seconds;
}

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size()))];
}

double Ratio(double one, double other) { return std::max(one / other, other / one); }

TEST(SpeedCorrection, FindsTheFactorOfEachPart) {
  std::mt19937_64 random(TestSeed());
  std::vector<double> of_products, of_attention, of_weights, of_predictions;
  for (int round = 0; round < 200; ++round) {
    const auto factor = [&] { return std::exp2(std::uniform_real_distribution<double>(-1.5, 2)(random)); };
    const PartFactors truth = {
        .products = factor(),
        .attention = factor(),
        .transfers = factor(),
        .weights = std::exp2(std::uniform_real_distribution<double>(-0.5, 0.5)(random)),
        .fixed_seconds = std::uniform_real_distribution<double>(-4e-3, 4e-3)(random)};
    Pool pool(truth, random());
    SpeedCorrection correction;
    for (int prefill = 0; prefill < 20; ++prefill) {
      const Prediction predicted = pool.Draw();
      correction.Observe(predicted, pool.Run(predicted.parts));
    }
    const PartFactors found = correction.factors();
    of_attention.push_back(Ratio(found.attention, truth.attention) - 1);
    of_products.push_back(Ratio(found.products, truth.products) - 1);
    of_weights.push_back(Ratio(found.weights, truth.weights) - 1);
    for (int prefill = 0; prefill < 20; ++prefill) {
      const PartSeconds parts = pool.Draw().parts;
      of_predictions.push_back(Ratio(Predicted(correction, parts), pool.Exactly(parts)) - 1);
    }
  }
  EXPECT_LT(Quantile(of_attention, 0.5), 0.05);
  EXPECT_LT(Quantile(of_attention, 0.9), 0.15);
  EXPECT_LT(Quantile(of_products, 0.5), 0.1);
  EXPECT_LT(Quantile(of_products, 0.9), 0.25);
  EXPECT_LT(Quantile(of_weights, 0.5), 0.1);
  EXPECT_LT(Quantile(of_weights, 0.9), 0.25);
  EXPECT_LT(Quantile(of_predictions, 0.5), 0.07);
  EXPECT_LT(Quantile(of_predictions, 0.95), 0.3);
}

// All takes three times as long as when the speeds were measured.
TEST(SpeedCorrection, FollowsAMachineThatIsBusy) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    Pool pool({.products = 3, .attention = 3, .transfers = 3, .fixed_seconds = 1e-3}, random());
    SpeedCorrection correction;
    for (int prefill = 0; prefill < 20; ++prefill) {
      const Prediction predicted = pool.Draw();
      correction.Observe(predicted, pool.Run(predicted.parts));
    }
    for (int prefill = 0; prefill < 20; ++prefill) {
      const PartSeconds parts = pool.Draw().parts;
      EXPECT_LT(Ratio(Predicted(correction, parts), pool.Exactly(parts)), 1.2) << "round " << round;
    }
  }
}

// Also later, when it has long been as it was: a large change, or one within what is trusted.
TEST(SpeedCorrection, FollowsAChange) {
  std::mt19937_64 random(TestSeed());
  for (const double change : {3.0, 1.4}) {
    std::vector<double> errors;
    for (int round = 0; round < 100; ++round) {
      const double later = round % 2 == 0 ? change : 1 / change;
      SpeedCorrection correction;
      Pool before({}, random());
      Pool after({.products = later, .attention = later, .transfers = later}, random());
      for (int prefill = 0; prefill < 300; ++prefill) {
        const Prediction predicted = before.Draw();
        correction.Observe(predicted, before.Run(predicted.parts));
      }
      for (int prefill = 0; prefill < 30; ++prefill) {
        const Prediction predicted = after.Draw();
        correction.Observe(predicted, after.Run(predicted.parts));
      }
      for (int prefill = 0; prefill < 20; ++prefill) {
        const PartSeconds parts = after.Draw().parts;
        errors.push_back(Ratio(Predicted(correction, parts), after.Exactly(parts)) - 1);
      }
    }
    EXPECT_LT(Quantile(errors, 0.5), 0.1) << change;
    EXPECT_LT(Quantile(errors, 0.9), 0.3) << change;
  }
}

TEST(SpeedCorrection, OneOutlierMovesItLittle) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    Pool pool({}, random());
    SpeedCorrection correction;
    const int before = Draw(random, 0, 60);
    for (int prefill = 0; prefill < before; ++prefill) {
      const Prediction predicted = pool.Draw();
      correction.Observe(predicted, pool.Run(predicted.parts));
    }
    const PartFactors factors = correction.factors();
    const Prediction predicted = pool.Draw();
    MeasuredSeconds outlier = pool.Run(predicted.parts);
    for (double* seconds : {&outlier.all, &outlier.attention, &outlier.comm_wait}) *seconds *= 10;
    correction.Observe(predicted, outlier);
    const PartFactors moved = correction.factors();
    const double most = before < 20 ? SpeedCorrection::kMostStep : 1.1;
    EXPECT_LE(Ratio(moved.products, factors.products), most * (1 + 1e-9)) << before;
    EXPECT_LE(Ratio(moved.attention, factors.attention), most * (1 + 1e-9)) << before;
    EXPECT_LE(Ratio(moved.transfers, factors.transfers), most * (1 + 1e-9)) << before;
  }
}

// Even the first prefill, when nothing is known: one that took far longer moves a factor less than half as
// far as one that took twice as long.
TEST(SpeedCorrection, AFirstOutlierMovesItLittle) {
  const auto moved = [](double seconds) {
    Prediction predicted;
    predicted.parts.attention = 1;
    SpeedCorrection correction;
    correction.Observe(predicted, {.all = seconds, .attention = seconds});
    return correction.factors().attention - 1;
  };
  for (const double times : {20, 40, 1000}) {
    EXPECT_GT(moved(times), 0) << times;
    EXPECT_LT(moved(times), moved(2) / 2) << times;
  }
}

// Good ones between them show that each was one.
TEST(SpeedCorrection, OutliersThatComeNowAndThenMoveItLittle) {
  Pool pool({}, TestSeed());
  SpeedCorrection correction;
  const auto run = [&](double factor) {
    const Prediction predicted = pool.Draw();
    MeasuredSeconds measured = pool.Run(predicted.parts);
    measured.all *= factor;
    measured.attention *= factor;
    measured.comm_wait *= factor;
    correction.Observe(predicted, measured);
  };
  for (int i = 0; i < 30; ++i) run(1);
  for (int i = 0; i < 60; ++i) {
    run(i % 6 == 0 ? 6 : 1);
    EXPECT_NEAR(correction.factors().products, 1, 0.2) << i;
    EXPECT_NEAR(correction.factors().attention, 1, 0.2) << i;
  }
}

TEST(SpeedCorrection, ReachesItsBoundsAndNoFurther) {
  constexpr double kMost = SpeedCorrection::kMostFactor;
  for (const auto& [times, bound] : {std::pair(1.5 * kMost, kMost), std::pair(0.5 / kMost, 1 / kMost)}) {
    Pool pool({.products = times, .attention = times, .transfers = times, .weights = times}, TestSeed());
    SpeedCorrection correction;
    for (int prefill = 0; prefill < 100; ++prefill) {
      const Prediction predicted = pool.Draw();
      correction.Observe(predicted, pool.Run(predicted.parts));
    }
    const PartFactors found = correction.factors();
    for (const double factor : {found.products, found.attention, found.transfers, found.weights}) {
      EXPECT_LE(factor, kMost);
      EXPECT_GE(factor, 1 / kMost);
      EXPECT_LT(Ratio(factor, bound), 1.2);
    }
  }
}

TEST(SpeedCorrection, NeverLeavesItsBounds) {
  std::mt19937_64 random(TestSeed());
  SpeedCorrection correction;
  const auto some_seconds = [&] {
    return Draw(random, 0, 9) == 0 ? 0 : std::exp(std::uniform_real_distribution<double>(-14, 14)(random));
  };
  const auto within = [](double factor) {
    return factor >= 1 / SpeedCorrection::kMostFactor && factor <= SpeedCorrection::kMostFactor;
  };
  for (int prefill = 0; prefill < 20000; ++prefill) {
    Prediction predicted;
    predicted.parts = {.products = some_seconds(),
                       .attention = some_seconds(),
                       .transfers = some_seconds(),
                       .weights = some_seconds(),
                       .fixed = some_seconds()};
    predicted.parts.hidden = predicted.parts.transfers * 0.5;
    correction.Observe(predicted,
                       {.all = some_seconds(), .attention = some_seconds(), .comm_wait = some_seconds()});
    const PartFactors factors = correction.factors();
    ASSERT_TRUE(within(factors.products) && within(factors.attention) && within(factors.transfers));
    ASSERT_TRUE(within(factors.weights));
    ASSERT_GE(factors.fixed_seconds, -predicted.parts.fixed);
    ASSERT_LE(factors.fixed_seconds, SpeedCorrection::kMostFixedSeconds);
  }
  Pool pool({}, random());
  for (int prefill = 0; prefill < 100; ++prefill) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
  }
  EXPECT_LT(Ratio(correction.factors().attention, 1), 1.25) << "it has not found back";
}

TEST(SpeedCorrection, SaysWhenTheSpeedsStayWrong) {
  std::mt19937_64 random(TestSeed());
  for (const double factor : {1.3, 3.0, 0.25}) {
    Pool pool({.products = factor, .attention = factor, .transfers = factor}, random());
    SpeedCorrection correction;
    const auto run = [&](Pool& from, int prefills) {
      for (int prefill = 0; prefill < prefills; ++prefill) {
        const Prediction predicted = from.Draw();
        correction.Observe(predicted, from.Run(predicted.parts));
      }
    };
    run(pool, SpeedCorrection::kWrongPrefills - 1);
    EXPECT_FALSE(correction.StaysWrong()) << factor;
    run(pool, 100);
    EXPECT_EQ(correction.StaysWrong(), factor != 1.3) << factor;
    const PartFactors factors = correction.factors();
    EXPECT_EQ(
        correction.WhatIsWrong(),
        absl::StrFormat("the pool's speed is wrong: products take %.2g and attention %.2g times as long as "
                        "it says, for 256 prefills",
                        factors.products, factors.attention));
    Pool right({}, random());
    run(right, 100);
    EXPECT_FALSE(correction.StaysWrong()) << "it is right again";
  }
}

TEST(SpeedCorrection, IgnoresSecondsThatAreNone) {
  SpeedCorrection correction;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const Prediction predicted = Pool({}, 1).Draw();
  for (const double none : {-1.0, nan, infinity}) {
    correction.Observe(predicted, {.all = none, .attention = 1, .comm_wait = 1});
    correction.Observe(predicted, {.all = 1, .attention = none, .comm_wait = 1});
    correction.Observe(predicted, {.all = 1, .attention = 1, .comm_wait = none});
  }
  EXPECT_EQ(correction.factors(), PartFactors());
}

TEST(SpeedCorrection, PlansAsMeasuredUntilAPrefillHasEnded) {
  const auto plain = MakePlan(kModel, {}, {.tokens = 1000, .ranks = 4});
  const auto corrected = PlanOf(SpeedCorrection(), 1000, 4);
  ASSERT_TRUE(plain.ok() && corrected.ok());
  EXPECT_EQ(corrected->plan, plain->plan);
}

TEST(SpeedCorrection, CorrectsSecondsAndNothingElse) {
  SpeedCorrection correction;
  Pool pool({.products = 2, .attention = 0.5, .transfers = 1.5, .fixed_seconds = 1e-3}, TestSeed());
  for (int prefill = 0; prefill < 20; ++prefill) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
  }
  const auto plain = MakePlan(kModel, {}, {.tokens = 1000, .ranks = 4});
  const auto corrected = PlanOf(correction, 1000, 4);
  ASSERT_TRUE(plain.ok() && corrected.ok());
  const Prediction& before = plain->plan.predicted;
  const Prediction& after = corrected->plan.predicted;
  EXPECT_EQ(corrected->plan.schedule, plain->plan.schedule);
  EXPECT_EQ(after.comm_bytes.total(), before.comm_bytes.total());
  EXPECT_EQ(after.peak_bytes, before.peak_bytes);
  EXPECT_EQ(after.parts, before.parts);
  EXPECT_NEAR(after.seconds, after.compute_seconds + after.comm_wait_seconds, 1e-12);
  const PartFactors factors = correction.factors();
  EXPECT_NEAR(after.compute_seconds,
              factors.products * before.parts.products + factors.attention * before.parts.attention +
                  std::max(0.0, before.parts.fixed + factors.fixed_seconds),
              1e-12);
  ASSERT_EQ(corrected->candidates.size(), plain->candidates.size());
  for (size_t i = 0; i < plain->candidates.size(); ++i) {
    EXPECT_EQ(corrected->candidates[i].tile, plain->candidates[i].tile);
    EXPECT_NEAR(corrected->candidates[i].predicted.seconds / after.seconds,
                plain->candidates[i].predicted.seconds / before.seconds, 1e-9);
  }
}

// A piece is corrected as a whole prompt of the same parts is.
TEST(SpeedCorrection, CorrectsEachPiece) {
  SpeedCorrection correction;
  Pool pool({.products = 2, .attention = 0.5, .transfers = 1.5}, TestSeed());
  for (int prefill = 0; prefill < 20; ++prefill) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
  }
  const auto in_pieces = [](const PoolSpeed& speed, const Topology&) {
    auto choice = MakePlan(kModel, speed, {.tokens = 1000, .ranks = 4});
    choice->pieces = {choice->plan, choice->plan};
    return choice;
  };
  const auto corrected = correction.Plan({}, {}, in_pieces);
  ASSERT_TRUE(corrected.ok()) << corrected.status();
  EXPECT_NE(corrected->plan.predicted, in_pieces({}, {})->plan.predicted);
  for (const Plan& piece : corrected->pieces) EXPECT_EQ(piece.predicted, corrected->plan.predicted);
}

// As where a short prompt waits for the weights of a large model.
TEST(SpeedCorrection, WaitsForWeightsAreNoProducts) {
  Prediction predicted;
  predicted.parts = {.products = 1, .transfers = 1e-3, .weights = 1};
  SpeedCorrection correction;
  for (int prefill = 0; prefill < 10; ++prefill) {
    correction.Observe(predicted, {.all = 2.001, .comm_wait = 1.001});
  }
  EXPECT_NEAR(correction.factors().products, 1, 0.01);
}

// Shared weights are waited for, streamed ones take cores.
TEST(SpeedCorrection, CorrectsWeightsAsTheyCome) {
  SpeedCorrection correction;
  Pool pool({.products = 2, .weights = 0.5}, TestSeed());
  for (int prefill = 0; prefill < 20; ++prefill) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
  }
  const PartFactors factors = correction.factors();
  for (const WeightMode mode : {WeightMode::kSharded, WeightMode::kStreamed}) {
    const auto with_weights = [mode](const PoolSpeed& speed, const Topology&) {
      return MakePlan(
          kModel, speed,
          {.tokens = 1000, .ranks = 4, .weights = {.mode = mode, .layer_seconds = 10, .head_seconds = 1}});
    };
    const Prediction before = with_weights({}, {})->plan.predicted;
    const Prediction after = correction.Plan({}, {}, with_weights)->plan.predicted;
    const double factor = mode == WeightMode::kSharded ? factors.weights : factors.products;
    EXPECT_NEAR(after.weight_seconds, factor * before.weight_seconds, 1e-9);
    EXPECT_NEAR(after.seconds, after.compute_seconds + after.comm_wait_seconds + after.weight_seconds, 1e-9);
    EXPECT_NEAR(after.seconds - after.weight_seconds,
                factors.products *
                        (before.parts.products - (mode == WeightMode::kSharded ? 0 : before.weight_seconds)) +
                    factors.attention * before.parts.attention + after.comm_wait_seconds +
                    std::max(0.0, before.parts.fixed + factors.fixed_seconds),
                1e-9);
  }
}

// What is as good as the best plan of the pool as it is ranks first, once prefills have shown how it is.
TEST(SpeedCorrection, RanksPlansByWhatPrefillsShow) {
  constexpr int64_t kTokens = 16384;
  constexpr int kRanks = 16;
  constexpr double kSlower = 6;  // links
  int tests = 0;
  for (double link = 1e11; link > 1e6; link /= 2) {
    PoolSpeed said;
    said.link_bytes_per_second = link;
    PoolSpeed truth = said;
    truth.link_bytes_per_second /= kSlower;
    truth.link_latency_seconds *= kSlower;
    const auto really = [&](const Plan& plan) {
      return MakePlan(kModel, truth,
                      {.tokens = kTokens, .ranks = kRanks, .tile = plan.tile, .heads = plan.heads})
          ->plan.predicted;
    };
    SpeedCorrection correction;
    const double before = really(PlanOf(correction, kTokens, kRanks, said)->plan).seconds;
    const double best = MakePlan(kModel, truth, {.tokens = kTokens, .ranks = kRanks})->plan.predicted.seconds;
    if (before < 1.1 * best) continue;
    ++tests;
    for (int prefill = 0; prefill < 100; ++prefill) {
      const Plan plan = PlanOf(correction, kTokens, kRanks, said)->plan;
      const Prediction took = really(plan);
      correction.Observe(
          plan.predicted,
          {.all = took.seconds, .attention = took.parts.attention, .comm_wait = took.comm_wait_seconds});
    }
    const auto found = PlanOf(correction, kTokens, kRanks, said);
    EXPECT_LT(really(found->plan).seconds, 1.05 * best) << link << " bytes/s";
    EXPECT_NEAR(found->plan.predicted.seconds / best, 1, 0.1) << link << " bytes/s";
  }
  EXPECT_GT(tests, 0);
}

// Every link is as much slower, within a node or out of it.
// What plans are ranked with is no part of what is predicted.
TEST(SpeedCorrection, PredictsTheSameWhateverItRanksWith) {
  Pool pool({.attention = 3, .transfers = 8}, TestSeed());
  SpeedCorrection correction;
  for (int i = 0; i < 60; ++i) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
  }
  const PartSeconds parts{.products = 1, .attention = 2, .transfers = 1.5, .hidden = 0.5};
  double attention = 1, transfers = 1;  // what it ranks with
  const auto choice = correction.Plan({}, {}, [&](const PoolSpeed& ranked, const Topology&) {
    attention = PoolSpeed().attention_flops_per_second / ranked.attention_flops_per_second;
    transfers = PoolSpeed().link_bytes_per_second / ranked.link_bytes_per_second;
    auto planned = MakePlan(kModel, ranked, {.tokens = 100, .ranks = 2});
    planned->plan.predicted.parts = {.products = parts.products,
                                     .attention = attention * parts.attention,
                                     .transfers = transfers * parts.transfers,
                                     .hidden = attention * parts.hidden};
    return planned;
  });
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_GT(attention, 1.5);
  EXPECT_GT(transfers, 1.5);
  const PartFactors factors = correction.factors();
  const double wait = factors.transfers * parts.transfers - factors.attention * parts.hidden;
  EXPECT_GT(wait, 0);
  EXPECT_NEAR(choice->plan.predicted.comm_wait_seconds, wait, 1e-9);
  EXPECT_NEAR(choice->plan.predicted.seconds,
              factors.products * parts.products + factors.attention * parts.attention + wait +
                  std::max(0.0, factors.fixed_seconds),
              1e-9);
}

TEST(SpeedCorrection, RanksAllLinksAlike) {
  Pool pool({.transfers = 4}, TestSeed());
  SpeedCorrection correction;
  for (int prefill = 0; prefill < 100; ++prefill) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
  }
  const PoolSpeed said_speed;
  const Topology said = {.same_node = {.latency_seconds = 1e-6, .bytes_per_second = 8e9},
                         .between_nodes = {.latency_seconds = 1e-5, .bytes_per_second = 4e9},
                         .node_bytes_per_second = 2e9};
  const auto look = [&](const PoolSpeed& speed, const Topology& ranked) {
    const double slower = said_speed.link_bytes_per_second / speed.link_bytes_per_second;
    EXPECT_GT(slower, 2);
    EXPECT_DOUBLE_EQ(speed.link_latency_seconds, slower * said_speed.link_latency_seconds);
    EXPECT_DOUBLE_EQ(ranked.node_bytes_per_second, said.node_bytes_per_second / slower);
    for (const auto link : {&Topology::same_node, &Topology::between_nodes}) {
      EXPECT_DOUBLE_EQ((ranked.*link).latency_seconds, slower * (said.*link).latency_seconds);
      EXPECT_DOUBLE_EQ((ranked.*link).bytes_per_second, (said.*link).bytes_per_second / slower);
    }
    return MakePlan(kModel, speed, {.tokens = 100, .ranks = 2});
  };
  EXPECT_TRUE(correction.Plan(said_speed, said, look).ok());
}

TEST(SpeedCorrection, NoiseChangesNoPlan) {
  Pool pool({}, TestSeed());
  SpeedCorrection correction;
  const auto before = PlanOf(correction, 16384, 16);
  for (int prefill = 0; prefill < 500; ++prefill) {
    const Prediction predicted = pool.Draw();
    correction.Observe(predicted, pool.Run(predicted.parts));
    if (prefill % 50 == 0) {
      EXPECT_EQ(PlanOf(correction, 16384, 16)->plan.schedule, before->plan.schedule);
    }
  }
}

TEST(SpeedCorrection, IsSafeOnAnyThread) {
  SpeedCorrection correction;
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&correction, seed] {
      Pool pool({.products = 1.5, .attention = 1.5, .transfers = 1.5}, seed);
      for (int prefill = 0; prefill < 200; ++prefill) {
        const Prediction predicted = pool.Draw();
        correction.Observe(predicted, pool.Run(predicted.parts));
        Predicted(correction, predicted.parts);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NEAR(correction.factors().attention, 1.5, 0.3);
}

}  // namespace
}  // namespace meshfill
