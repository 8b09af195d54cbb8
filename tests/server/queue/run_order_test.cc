// The order by itself, in virtual time: who goes first, by rest, class and arrival, and what it makes of what
// prompts turn out to take.
#include "server/queue/run_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/engine/random_seed.h"
#include "tests/server/queue/run_order_pool.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;

// 90 % of 0.1 s, 9 % of 1.5 s, 1 % of 40 s at 0.8 of what the pool can do, of two tenants; predictions err by
// up to a third.
std::vector<Prompt> Mix(std::mt19937_64& random) {
  constexpr double kMeanWork = 0.9 * 0.1 + 0.09 * 1.5 + 0.01 * 40;
  std::vector<Prompt> prompts;
  double now = 0;
  for (int i = 0; i < 3000; ++i) {
    now += Exponential(random, kMeanWork / 0.8);
    const int kind = Draw(random, 0, 99);
    prompts.push_back({.comes = now,
                       .work = kind < 90   ? 0.1
                               : kind < 99 ? 1.5
                                           : 40,
                       .tenant = Draw(random, 0, 1) == 0 ? "a" : "b",
                       .predicted_of_work = Draw(random, 75, 133) / 100.0,
                       .begins = {},
                       .ends = {}});
  }
  return prompts;
}

TEST(RunOrder, ShortOnesDoNotWaitForLongOnesInAMix) {
  std::mt19937_64 random(TestSeed());
  std::vector<Prompt> prompts = Mix(random);
  OrderedPool({.max_age = absl::Hours(1), .most_live = 8}, prompts).Run();
  std::vector<double> short_ones;
  double free_at = 0;
  std::vector<double> served_in_turn;
  for (const Prompt& prompt : prompts) {
    free_at = std::max(free_at, prompt.comes) + prompt.work;
    if (prompt.work > 0.1) continue;
    short_ones.push_back(prompt.slowdown());
    served_in_turn.push_back((free_at - prompt.comes) / prompt.work);
  }
  const double first_comes_first_served = Percentile(served_in_turn, 0.95);
  EXPECT_LE(Percentile(short_ones, 0.95), 5) << "first come, first served: " << first_comes_first_served;
  EXPECT_LE(Percentile(short_ones, 0.99), 20);
  EXPECT_GE(first_comes_first_served, 50) << "the mix is too easy to show anything";
}

// The prompt's latency is its own work, whenever it comes.
TEST(RunOrder, AShortOneBehindALongOneBeginsAtOnce) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 200; ++draw) {
    const double comes = Draw(random, 0, 13000) / 1000.0;
    std::vector<Prompt> prompts = {{.comes = 0, .work = 14, .begins = {}, .ends = {}},
                                   {.comes = comes, .work = 0.004, .begins = {}, .ends = {}}};
    OrderedPool({.most_live = 8}, prompts).Run();
    EXPECT_NEAR(*prompts[1].ends, comes + 0.004, 1e-6);
    EXPECT_NEAR(*prompts[0].ends, 14.004, 1e-6);
  }
}

TEST(RunOrder, WhatIsOverItsPredictionGivesWay) {
  RunOrder order({.most_live = 8});
  order.Announce(1, {.tenant = "t", .work_seconds = 10}, At(0));
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Announce(2, {.tenant = "t", .work_seconds = 0.5}, At(10));
  order.Complete(2, At(10));
  EXPECT_EQ(order.Choose(At(10)), 1u);  // as good as done
  // Half of the rest, x, is the other's work as it looks after x seconds, 0.5 / (1 + x / (16 · 0.5)), at
  // 0.90.
  EXPECT_EQ(order.Choose(At(10.85)), 1u);
  EXPECT_NEAR(order.RestSeconds(1, At(10.85)), 0.85, 1e-9);
  EXPECT_EQ(order.Choose(At(10.95)), 2u);
  order.Remove(2, At(11.6));
  EXPECT_EQ(order.Choose(At(11.6)), 1u);
}

// A prompt was predicted 1.4 times as long as those that come after it, and is as long as they are.
TEST(RunOrder, WhatIsAboutAsLongGoesByArrival) {
  constexpr double kWork = 0.1;
  RunOrder order({.most_live = 8});
  order.Announce(1, {.tenant = "t", .work_seconds = 1.4 * kWork}, At(0));
  order.Complete(1, At(0));
  // Three always wait: the one that has begun ends, and another one comes.
  uint64_t last = 1;
  const auto comes = [&](double now) {
    order.Announce(++last, {.tenant = "t", .work_seconds = kWork}, At(now));
    order.Complete(last, At(now));
  };
  comes(0);
  comes(0);
  int ended_before = 0;
  for (double now = 0; ended_before < 100; now += kWork, ++ended_before) {
    const uint64_t turn = order.Choose(At(now));
    if (turn == 1) break;
    order.Remove(turn, At(now + kWork));
    comes(now + kWork);
  }
  EXPECT_GE(ended_before, 2);
  EXPECT_LE(ended_before, 15);
}

// Of two alike, one ends as early as it can: they do not take turns.
TEST(RunOrder, EqualOnesRunOneAfterTheOther) {
  std::vector<Prompt> prompts;
  for (int i = 0; i < 10; ++i) {
    prompts.push_back(
        {.comes = 0.01 * i, .work = 1, .tenant = i % 2 == 0 ? "a" : "b", .begins = {}, .ends = {}});
  }
  OrderedPool({.most_live = 8}, prompts).Run();
  for (const Prompt& prompt : prompts) EXPECT_NEAR(*prompt.ends - *prompt.begins, 1, 1e-6);
}

TEST(RunOrder, AHigherClassGoesFirst) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 1, .begins = {}, .ends = {}},
                                 {.comes = 0.5, .work = 10, .priority = 7, .begins = {}, .ends = {}},
                                 {.comes = 0.6, .work = 4, .priority = 2, .begins = {}, .ends = {}}};
  OrderedPool({.most_live = 8}, prompts).Run();
  EXPECT_NEAR(*prompts[2].ends, 4.6, 1e-6) << "classes are bounded: 7 counts as 2";
  EXPECT_NEAR(*prompts[1].ends, 14.5, 1e-6);
  EXPECT_NEAR(*prompts[0].ends, 15, 1e-6);
}

TEST(RunOrder, NothingGivesWayWhereOneLives) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 10, .begins = {}, .ends = {}},
                                 {.comes = 1, .work = 2, .begins = {}, .ends = {}},
                                 {.comes = 2, .work = 1, .begins = {}, .ends = {}}};
  OrderedPool({.most_live = 1}, prompts).Run();
  EXPECT_NEAR(*prompts[0].ends, 10, 1e-6);
  EXPECT_NEAR(*prompts[2].ends, 11, 1e-6);
  EXPECT_NEAR(*prompts[1].ends, 13, 1e-6);
}

// What a lost worker had done is computed again: it tells nothing of how fast the rest will be.
TEST(RunOrder, WhatIsBegunAnewIsMeasuredAnew) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  order.Announce(1, {.tenant = "t", .work_seconds = 10}, At(0));
  order.Complete(1, At(0));
  order.Choose(At(0));
  order.SetDone(1, 0.6, At(6));
  EXPECT_NEAR(order.RestSeconds(1, At(6)), 4, 1e-9);
  order.BeginAnew(1);
  order.SetDone(1, 0.1, At(9));
  EXPECT_NEAR(order.RestSeconds(1, At(9)), 9, 1e-9);
  order.SetDone(1, 0.3, At(15));
  EXPECT_NEAR(order.RestSeconds(1, At(15)), 0.7 * (7 + 0.7 * 10), 1e-9) << "slower than before";
}

// Others of its length come first only once it has shown that it takes far longer.
TEST(RunOrder, OneSlowLayerLosesNoTurn) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  for (const Ticket ticket : {1, 2}) {
    order.Announce(ticket, {.tenant = "t", .work_seconds = 10}, At(0));
    order.Complete(ticket, At(0));
  }
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.SetDone(1, 0.25, At(14));
  EXPECT_NEAR(order.RestSeconds(1, At(14)), 0.75 * (14 + 0.75 * 10), 1e-9);
  EXPECT_EQ(order.Choose(At(14)), 1u);
  order.SetDone(1, 0.5, At(40));
  EXPECT_EQ(order.Choose(At(40)), 2u) << "as slow once more";
}

TEST(RunOrder, WhatIsLostBeforeItsFirstLayerCountsForNothing) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  order.Announce(1, {.tenant = "t", .work_seconds = 10}, At(0));
  order.Complete(1, At(0));
  order.Choose(At(0));
  order.BeginAnew(1);
  order.SetDone(1, 0.1, At(600));
  EXPECT_NEAR(order.RestSeconds(1, At(600)), 9, 1e-9);
}

// Nobody waits for an announcement, and a tenant has no turns for the time while its prompt was on its way.
TEST(RunOrder, AnAnnouncementHoldsNothing) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  order.Announce(1, {.tenant = "slow", .work_seconds = 1.5}, At(0));
  order.Announce(2, {.tenant = "busy", .work_seconds = 100}, At(0));
  order.Complete(2, At(0));
  EXPECT_EQ(order.Choose(At(0)), 2u);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "busy", .work_seconds = 200}, At(50)), 50, 1e-6);
  EXPECT_NEAR(order.MostWaitSeconds(At(50)), 50, 1e-6);
  order.Pay(1);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "busy", .work_seconds = 200}, At(50)), 51.5, 1e-6);
  EXPECT_NEAR(order.MostWaitSeconds(At(50)), 51.5, 1e-6);
  order.Announce(3, {.tenant = "busy", .work_seconds = 1}, At(99));
  order.Complete(3, At(99));
  order.Complete(1, At(99));
  order.Remove(2, At(100));
  EXPECT_EQ(order.Choose(At(100)), 3u) << "the slow one's prompt is longer, and it has been owed nothing";
}

// What is being stopped computes no more, and nobody waits for the rest of it.
TEST(RunOrder, WhatLeavesIsNotWaitedFor) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 1});
  order.Announce(1, {.tenant = "t", .work_seconds = 100}, At(0));
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "t", .work_seconds = 1}, At(10)), 90, 1e-6);
  EXPECT_NEAR(order.MostWaitSeconds(At(10)), 90, 1e-6);
  order.Leave(1, At(10));
  EXPECT_NEAR(order.WaitSeconds({.tenant = "t", .work_seconds = 1}, At(10)), 0, 1e-6);
  EXPECT_NEAR(order.MostWaitSeconds(At(10)), 0, 1e-6);
  EXPECT_TRUE(order.Turns(At(10)).empty());
  EXPECT_EQ(order.Choose(At(10)), 0u) << "it is still there";
}

}  // namespace
}  // namespace meshfill
