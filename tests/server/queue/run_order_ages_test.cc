// What has waited for max_age, in virtual time: it ends in twice its work, and others do not wait for more
// than that.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "server/queue/run_order.h"
#include "tests/engine/random_seed.h"
#include "tests/server/queue/run_order_pool.h"

namespace meshfill {
namespace {

TEST(RunOrderAges, NobodyWaitsLongerThanMaxAge) {
  std::mt19937_64 random(TestSeed());
  constexpr double kMaxAge = 20;
  for (const bool by_class : {true, false}) {
    std::vector<Prompt> prompts;
    // Twice what the pool can do, of short ones or of the highest class.
    double now = 0;
    for (int i = 0; i < 800; ++i) {
      now += Exponential(random, 0.05);
      prompts.push_back({.comes = now, .work = 0.1, .priority = by_class ? 2 : 0, .begins = {}, .ends = {}});
    }
    const size_t starved = prompts.size();
    prompts.push_back(
        {.comes = 10, .work = by_class ? 0.1 : 5, .priority = by_class ? -2 : 0, .begins = {}, .ends = {}});
    OrderedPool pool({.max_age = absl::Seconds(kMaxAge), .most_live = 8}, prompts);
    pool.look_seconds = 0.05;
    pool.Run();
    EXPECT_GE(*prompts[starved].begins, 10 + kMaxAge / 2) << "nothing held it back";
    EXPECT_LE(*prompts[starved].begins, 10 + kMaxAge + 0.2);
    EXPECT_LE(*prompts[starved].ends, 10 + kMaxAge + 2 * prompts[starved].work + 0.2);
  }
}

// More long prompts wait than end within max_age. Short ones that come do not wait for them to end, and those
// end all the same, however many short ones come.
TEST(RunOrderAges, ShortOnesDoNotWaitForAnAgedBacklog) {
  std::mt19937_64 random(TestSeed());
  constexpr double kMaxAge = 10, kLong = 5;
  constexpr int kLongOnes = 20;
  for (const bool flood : {false, true}) {
    const double short_work = flood ? 0.5 : 0.05;
    std::vector<Prompt> prompts;
    for (int i = 0; i < kLongOnes; ++i) {
      prompts.push_back({.comes = 0.01 * i, .work = kLong, .begins = {}, .ends = {}});
    }
    for (double now = 11; now < 80; now += flood ? 0.25 : Draw(random, 400, 600) / 1000.0) {
      prompts.push_back({.comes = now, .work = short_work, .begins = {}, .ends = {}});
    }
    OrderedPool pool({.max_age = absl::Seconds(kMaxAge), .most_live = 8}, prompts);
    pool.look_seconds = 0.05;
    pool.Run();
    for (const Prompt& prompt : prompts) {
      if (prompt.work == kLong) {
        EXPECT_LE(*prompt.ends, kMaxAge + 2 * kLong * kLongOnes);
      } else if (!flood) {
        EXPECT_LE(*prompt.begins, prompt.comes + 0.3);
      }
    }
  }
}

// Each aged prompt has its half of the time: one that has computed for long leaves the next none of its
// credit.
TEST(RunOrderAges, EachAgedOneEndsWithinTwiceItsWork) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 60, .begins = {}, .ends = {}},
                                 {.comes = 0.1, .work = 4, .priority = -1, .begins = {}, .ends = {}},
                                 {.comes = 0.2, .work = 11, .priority = 2, .begins = {}, .ends = {}}};
  // Short ones as fast as the pool computes them, when the first has computed for long.
  for (double now = 68; now < 120; now += 0.05) {
    prompts.push_back({.comes = now, .work = 0.05, .begins = {}, .ends = {}});
  }
  OrderedPool pool({.max_age = absl::Seconds(10), .most_live = 8}, prompts);
  pool.look_seconds = 0.05;
  pool.Run();
  EXPECT_GE(*prompts[0].ends, 68);
  EXPECT_LE(*prompts[1].begins, *prompts[0].ends + 0.2);
  EXPECT_LE(*prompts[1].ends, *prompts[0].ends + 2 * 4 + 0.2);
}

// A class has half of the time, though what is aged is of a lower one.
TEST(RunOrderAges, AHigherClassWaitsForAnAgedOneNoLongerThanForItself) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 2.3, .priority = 1, .begins = {}, .ends = {}},
                                 {.comes = 0.1, .work = 100, .priority = -2, .begins = {}, .ends = {}},
                                 {.comes = 2.5, .work = 5, .priority = 2, .begins = {}, .ends = {}}};
  OrderedPool pool({.max_age = absl::Seconds(2), .most_live = 8}, prompts);
  pool.look_seconds = 0.05;
  pool.Run();
  EXPECT_NEAR(*prompts[1].begins, 2.1, 0.1);
  EXPECT_NEAR(*prompts[2].begins, 2.3 + 0.2 + 5, 0.2) << "after the first one's rest";
}

// One that takes longer than predicted ends before an aged one goes on, as far as it is not too much longer.
TEST(RunOrderAges, AWrongPredictionDoesNotTakeTurnsWithAnAgedOne) {
  for (const double predicted_of_work : {0.9, 1.0}) {
    std::vector<Prompt> prompts = {{.comes = 0, .work = 2.3, .priority = 1, .begins = {}, .ends = {}},
                                   {.comes = 0, .work = 100, .begins = {}, .ends = {}},
                                   {.comes = 3,
                                    .work = 8,
                                    .priority = 1,
                                    .predicted_of_work = predicted_of_work,
                                    .begins = {},
                                    .ends = {}}};
    OrderedPool pool({.max_age = absl::Seconds(2), .most_live = 8}, prompts);
    pool.look_seconds = 0.05;
    pool.Run();
    EXPECT_GE(*prompts[2].begins, 9) << "nothing held it back";
    EXPECT_NEAR(*prompts[2].ends, *prompts[2].begins + 8, 1e-6);
  }
}

// Time that it computes is no time that it waits: only waiting makes a prefill old.
TEST(RunOrderAges, WhatComputesForLongGetsNoOlder) {
  RunOrder order({.max_age = absl::Seconds(10), .most_live = 8});
  order.Announce(1, {.tenant = "t", .work_seconds = 100}, At(0));
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Announce(2, {.tenant = "t", .priority = 1, .work_seconds = 40}, At(30));
  order.Complete(2, At(30));
  EXPECT_EQ(order.Choose(At(30)), 2u);
  EXPECT_EQ(order.Choose(At(39)), 2u);
  EXPECT_EQ(order.Choose(At(41)), 1u) << "now it has stood still for too long";
}

}  // namespace
}  // namespace meshfill
