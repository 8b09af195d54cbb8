// The order by itself, in virtual time: random prompts come, and a pool computes what the order says.
#include "server/queue/run_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

struct Prompt {
  double comes = 0;  // s
  double work = 0;   // s
  std::string tenant;
  int priority = 0;
  double predicted_of_work = 1;  // the prediction, as a part of the work
  double weight = 1;             // of the tenant
  double deadline = std::numeric_limits<double>::infinity();

  // What the simulation finds.
  std::optional<double> begins;
  std::optional<double> ends;
  double slowdown() const { return (*ends - comes) / work; }
};

// One prompt computes at a time, as a pool with a layer in each `layer_share` of the work tells of it.
class Pool {
 public:
  Pool(const RunOrder::Options& options, std::vector<Prompt>& prompts)
      : options_(options), order_(options), prompts_(prompts), done_(prompts.size(), 0) {}

  // Called whenever somebody computed: who, from when to when.
  std::function<void(const Prompt&, double, double)> on_computed = [](const Prompt&, double, double) {};

  // Between two looks at whose turn it is, where nothing happens.
  double look_seconds = std::numeric_limits<double>::infinity();

  void Run() {
    std::vector<size_t> by_time(prompts_.size());
    for (size_t i = 0; i < by_time.size(); ++i) by_time[i] = i;
    std::sort(by_time.begin(), by_time.end(),
              [&](size_t left, size_t right) { return prompts_[left].comes < prompts_[right].comes; });
    size_t next = 0, ended = 0;
    double now = 0;
    while (ended < prompts_.size()) {
      const double next_comes =
          next < by_time.size() ? prompts_[by_time[next]].comes : std::numeric_limits<double>::infinity();
      const Ticket ticket = order_.Choose(At(now));
      ASSERT_LE(order_.live(), options_.most_live);
      double until = next_comes;
      if (ticket != 0) {
        Prompt& prompt = prompts_[ticket - 1];
        double& done = done_[ticket - 1];
        if (!prompt.begins.has_value()) prompt.begins = now;
        const double layer = prompt.work / kLayers;
        const double layer_ends = std::min(prompt.work, (std::floor(done / layer + 1e-6) + 1) * layer);
        until = std::min({next_comes, now + layer_ends - done, now + look_seconds});
        on_computed(prompt, now, until);
        done += until - now;
        now = until;
        if (done >= prompt.work * (1 - 1e-9)) {
          prompt.ends = now;
          ++ended;
          order_.Remove(ticket, At(now));
        } else if (std::abs(done - layer_ends) < 1e-9) {
          order_.SetDone(ticket, done / prompt.work, At(now));
        }
      } else {
        ASSERT_EQ(ended, next) << "nobody computes, though somebody waits";
        now = until;
      }
      if (now < next_comes) continue;
      const Prompt& comes = prompts_[by_time[next]];
      const Ticket added = by_time[next++] + 1;
      order_.Announce(added,
                      {.tenant = comes.tenant,
                       .priority = comes.priority,
                       .work_seconds = comes.work * comes.predicted_of_work,
                       .weight = comes.weight,
                       .deadline = At(comes.deadline)},
                      At(now));
      order_.Complete(added, At(now));
    }
  }

 private:
  static constexpr double kLayers = 16;

  const RunOrder::Options options_;
  RunOrder order_;
  std::vector<Prompt>& prompts_;
  std::vector<double> done_;
};

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

double Exponential(std::mt19937_64& random, double mean) {
  return std::exponential_distribution<double>(1 / mean)(random);
}

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
  Pool({.max_age = absl::Hours(1), .most_live = 8}, prompts).Run();
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
    Pool({.most_live = 8}, prompts).Run();
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
  Pool({.most_live = 8}, prompts).Run();
  for (const Prompt& prompt : prompts) EXPECT_NEAR(*prompt.ends - *prompt.begins, 1, 1e-6);
}

TEST(RunOrder, NobodyWaitsLongerThanMaxAge) {
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
    Pool pool({.max_age = absl::Seconds(kMaxAge), .most_live = 8}, prompts);
    pool.look_seconds = 0.05;
    pool.Run();
    EXPECT_GE(*prompts[starved].begins, 10 + kMaxAge / 2) << "nothing held it back";
    EXPECT_LE(*prompts[starved].begins, 10 + kMaxAge + 0.2);
    EXPECT_LE(*prompts[starved].ends, 10 + kMaxAge + 2 * prompts[starved].work + 0.2);
  }
}

// More long prompts wait than end within max_age. Short ones that come do not wait for them to end, and those
// end all the same, however many short ones come.
TEST(RunOrder, ShortOnesDoNotWaitForAnAgedBacklog) {
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
    Pool pool({.max_age = absl::Seconds(kMaxAge), .most_live = 8}, prompts);
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
TEST(RunOrder, EachAgedOneEndsWithinTwiceItsWork) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 60, .begins = {}, .ends = {}},
                                 {.comes = 0.1, .work = 4, .priority = -1, .begins = {}, .ends = {}},
                                 {.comes = 0.2, .work = 11, .priority = 2, .begins = {}, .ends = {}}};
  // Short ones as fast as the pool computes them, when the first has computed for long.
  for (double now = 68; now < 120; now += 0.05) {
    prompts.push_back({.comes = now, .work = 0.05, .begins = {}, .ends = {}});
  }
  Pool pool({.max_age = absl::Seconds(10), .most_live = 8}, prompts);
  pool.look_seconds = 0.05;
  pool.Run();
  EXPECT_GE(*prompts[0].ends, 68);
  EXPECT_LE(*prompts[1].begins, *prompts[0].ends + 0.2);
  EXPECT_LE(*prompts[1].ends, *prompts[0].ends + 2 * 4 + 0.2);
}

// Long prompts of other tenants have begun, so many as may: a short one that comes waits for no end of
// theirs.
TEST(RunOrder, TheLastPlaceIsKeptForAShortOne) {
  std::vector<Prompt> prompts;
  for (const char* tenant : {"a", "b", "c"}) {
    prompts.push_back({.comes = 0, .work = 100, .tenant = tenant, .begins = {}, .ends = {}});
  }
  prompts.push_back({.comes = 60, .work = 0.1, .tenant = "d", .begins = {}, .ends = {}});
  Pool pool({.max_age = absl::Hours(1), .most_live = 3}, prompts);
  pool.look_seconds = 0.05;
  pool.Run();
  EXPECT_LE(*prompts[0].begins, 0.1);
  EXPECT_LE(*prompts[1].begins, 60) << "both live";
  EXPECT_GE(*prompts[2].begins, std::min(*prompts[0].ends, *prompts[1].ends));
  EXPECT_LE(*prompts[3].ends, 60.2);
}

// What it is told knows that place.
TEST(RunOrder, PredictsTheWaitForAPlace) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 2});
  order.Announce(1, {.tenant = "t", .work_seconds = 10}, At(0));
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  EXPECT_EQ(order.WaitSeconds({.tenant = "t", .priority = 1, .work_seconds = 4.9}, At(0)), 0);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "t", .priority = 1, .work_seconds = 5.1}, At(0)), 10, 1e-6);
}

TEST(RunOrder, WhatIsBeingStoppedKeepsNobodyFromTheLastPlace) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 2});
  order.Announce(1, {.tenant = "t", .work_seconds = 10}, At(0));
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Leave(1, At(1));
  order.Announce(2, {.tenant = "t", .work_seconds = 40}, At(1));
  order.Complete(2, At(1));
  EXPECT_EQ(order.Choose(At(1)), 2u);
}

// Two have waited for max_age. The first waits for memory, and the next may not begin before it: short ones
// wait no longer than for themselves all the same.
TEST(RunOrder, ShortOnesDoNotWaitForAgedOnesThatWaitForMemory) {
  RunOrder order({.max_age = absl::Seconds(10), .most_live = 8});
  const auto come = [&](Ticket ticket, double work, double now) {
    order.Announce(ticket, {.tenant = "t", .work_seconds = work}, At(now));
    order.Complete(ticket, At(now));
  };
  come(1, 100, 0);
  ASSERT_EQ(order.Choose(At(0)), 1u);
  come(2, 120, 0.1);
  come(3, 110, 0.2);
  ASSERT_EQ(order.Choose(At(10.3)), 2u);
  order.PutBack(2, At(10.3));
  for (double now = 10.3; now < 20; now += 0.1) ASSERT_EQ(order.Choose(At(now)), 1u);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "t", .work_seconds = 1}, At(20)), 0, 1e-6);
  come(4, 1, 20);
  EXPECT_EQ(order.Choose(At(20)), 4u);
  order.Remove(4, At(21));
  EXPECT_EQ(order.Choose(At(21)), 2u) << "there may be memory again";
}

// One that waits for memory goes before all others, but for what is short beside it and beside what lives.
TEST(RunOrder, ShortOnesBeginBeforeWhoWaitsForMemory) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  const auto come = [&](Ticket ticket, double work, int priority = 0) {
    order.Announce(ticket, {.tenant = "t", .priority = priority, .work_seconds = work}, At(0));
    order.Complete(ticket, At(0));
  };
  come(1, 100);
  ASSERT_EQ(order.Choose(At(0)), 1u);
  come(2, 30, /*priority=*/1);
  ASSERT_EQ(order.Choose(At(0)), 2u);
  order.PutBack(2, At(0));
  come(3, 16);
  EXPECT_EQ(order.Choose(At(0)), 1u);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "t", .work_seconds = 15.5}, At(0)), 130, 1e-6);
  EXPECT_EQ(order.WaitSeconds({.tenant = "t", .work_seconds = 14}, At(0)), 0);
  come(4, 14);
  EXPECT_EQ(order.Choose(At(0)), 4u);
  come(5, 6);
  EXPECT_EQ(order.Choose(At(0)), 5u) << "short beside that, too";
}

// Short ones come as fast as the ranks could compute them twice. Who waits for memory has it as soon as what
// lives has ended.
TEST(RunOrder, ShortOnesDoNotStarveWhoWaitsForMemory) {
  constexpr double kMaxAge = 5, kLong = 20, kStep = 0.05;
  RunOrder order({.max_age = absl::Seconds(kMaxAge), .most_live = 8});
  std::map<Ticket, double> rest;
  const auto come = [&](Ticket ticket, double work, int priority, double now) {
    order.Announce(ticket, {.tenant = "t", .priority = priority, .work_seconds = work}, At(now));
    order.Complete(ticket, At(now));
    rest[ticket] = work;
  };
  come(1, kLong, 0, 0);
  ASSERT_EQ(order.Choose(At(0)), 1u);
  come(2, 10, 1, 0);
  double now = 0;
  for (Ticket last = 2; now < 100; now += kStep) {
    if (now > 0.25 * static_cast<double>(last - 2)) come(++last, 0.5, 0, now);
    while (order.Choose(At(now)) == 2 && order.live() > 1) order.PutBack(2, At(now));
    const Ticket ticket = order.Choose(At(now));
    if (ticket == 2) break;
    if ((rest.at(ticket) -= kStep) < 1e-9) order.Remove(ticket, At(now + kStep));
  }
  EXPECT_LE(now, kMaxAge + 2 * kLong + 1);
}

// A class has half of the time, though what is aged is of a lower one.
TEST(RunOrder, AHigherClassWaitsForAnAgedOneNoLongerThanForItself) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 2.3, .priority = 1, .begins = {}, .ends = {}},
                                 {.comes = 0.1, .work = 100, .priority = -2, .begins = {}, .ends = {}},
                                 {.comes = 2.5, .work = 5, .priority = 2, .begins = {}, .ends = {}}};
  Pool pool({.max_age = absl::Seconds(2), .most_live = 8}, prompts);
  pool.look_seconds = 0.05;
  pool.Run();
  EXPECT_NEAR(*prompts[1].begins, 2.1, 0.1);
  EXPECT_NEAR(*prompts[2].begins, 2.3 + 0.2 + 5, 0.2) << "after the first one's rest";
}

// One that takes longer than predicted ends before an aged one goes on, as far as it is not too much longer.
TEST(RunOrder, AWrongPredictionDoesNotTakeTurnsWithAnAgedOne) {
  for (const double predicted_of_work : {0.9, 1.0}) {
    std::vector<Prompt> prompts = {{.comes = 0, .work = 2.3, .priority = 1, .begins = {}, .ends = {}},
                                   {.comes = 0, .work = 100, .begins = {}, .ends = {}},
                                   {.comes = 3,
                                    .work = 8,
                                    .priority = 1,
                                    .predicted_of_work = predicted_of_work,
                                    .begins = {},
                                    .ends = {}}};
    Pool pool({.max_age = absl::Seconds(2), .most_live = 8}, prompts);
    pool.look_seconds = 0.05;
    pool.Run();
    EXPECT_GE(*prompts[2].begins, 9) << "nothing held it back";
    EXPECT_NEAR(*prompts[2].ends, *prompts[2].begins + 8, 1e-6);
  }
}

// The credit that lets one go before an aged prompt is gone when that one has ended.
TEST(RunOrder, PredictsThatACreditIsSpent) {
  RunOrder order({.max_age = absl::Seconds(10), .most_live = 8});
  const auto come = [&](Ticket ticket, double work, double now) {
    order.Announce(ticket, {.tenant = "t", .work_seconds = work}, At(now));
    order.Complete(ticket, At(now));
  };
  come(1, 11, 0);
  come(2, 1000, 0);
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Remove(1, At(11));
  EXPECT_EQ(order.Choose(At(11)), 2u);
  for (const Ticket ticket : {3, 4, 5}) come(ticket, 8, 21);
  EXPECT_EQ(order.Choose(At(21)), 3u) << "10 s of credit";
  const std::vector<RunOrder::Turn> turns = order.Turns(At(21));
  EXPECT_EQ(turns[1].ticket, 2u);
  EXPECT_EQ(turns[2].ticket, 4u);
  EXPECT_NEAR(turns[2].begins_seconds, 8 + 6, 0.1) << "2 s of credit are left when the first has ended";
}

// What waits for an aged prompt hears of its wait what will be; but for a few, where a moment decides whether
// a short one still is beside what is left of the aged one.
TEST(RunOrder, PredictsTheWaitForAnAgedOne) {
  std::mt19937_64 random(TestSeed());
  constexpr int kDraws = 200;
  int wrong = 0;
  for (int draw = 0; draw < kDraws; ++draw) {
    RunOrder order({.max_age = absl::Seconds(10), .most_live = 8});
    std::map<Ticket, double> rest;
    const auto add = [&](Ticket ticket, double work, double now) {
      order.Announce(ticket, {.tenant = "t", .work_seconds = work}, At(now));
      order.Complete(ticket, At(now));
      rest[ticket] = work;
    };
    double now = 0;
    const auto look = [&] {
      const Ticket ticket = order.Choose(At(now));
      const double step = std::min(0.02, rest.at(ticket));
      now += step;
      if ((rest.at(ticket) -= step) > 1e-9) return;
      order.Remove(ticket, At(now));
      rest.erase(ticket);
    };
    for (Ticket ticket = 1; ticket <= 30; ++ticket) add(ticket, Draw(random, 4000, 9000) / 1000.0, 0);
    const double until = Draw(random, 20, 60);
    while (now < until) look();
    Ticket last = 30;
    for (int i = Draw(random, 0, 5); i > 0; --i) add(++last, Draw(random, 10, 1500) / 1000.0, now);
    const double work = Draw(random, 10, 1500) / 1000.0;
    const double predicted = order.WaitSeconds({.tenant = "t", .work_seconds = work}, At(now));
    add(++last, work, now);
    const double told_at = now;
    while (order.Choose(At(now)) != last) look();
    if (std::abs(now - told_at - predicted) > 0.2 + 0.1 * predicted) ++wrong;
  }
  EXPECT_LE(wrong, kDraws / 10) << "a moment decides whether the credit is enough";
}

TEST(RunOrder, AFloodOfOneTenantLeavesTheOtherItsHalf) {
  std::mt19937_64 random(TestSeed());
  for (const double others_work : {0.5, 2.0}) {
    std::vector<Prompt> prompts;
    for (int i = 0; i < 300; ++i) {
      prompts.push_back({.comes = 0.001 * i, .work = 0.5, .tenant = "flood", .begins = {}, .ends = {}});
    }
    for (int i = 0; i < 100 / others_work; ++i) {
      prompts.push_back(
          {.comes = 5 + 0.01 * i, .work = others_work, .tenant = "other", .begins = {}, .ends = {}});
    }
    Pool pool({.max_age = absl::Hours(1), .most_live = 8}, prompts);
    std::map<std::string, double> computed;
    pool.on_computed = [&](const Prompt& prompt, double begin, double end) {
      if (begin >= 5 && computed["other"] < 99) computed[prompt.tenant] += end - begin;
    };
    pool.Run();
    EXPECT_GE(computed["other"] / (computed["other"] + computed["flood"]), 0.45)
        << "prompts of " << others_work << " s";
  }
}

TEST(RunOrder, AHigherClassGoesFirst) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 1, .begins = {}, .ends = {}},
                                 {.comes = 0.5, .work = 10, .priority = 7, .begins = {}, .ends = {}},
                                 {.comes = 0.6, .work = 4, .priority = 2, .begins = {}, .ends = {}}};
  Pool({.most_live = 8}, prompts).Run();
  EXPECT_NEAR(*prompts[2].ends, 4.6, 1e-6) << "classes are bounded: 7 counts as 2";
  EXPECT_NEAR(*prompts[1].ends, 14.5, 1e-6);
  EXPECT_NEAR(*prompts[0].ends, 15, 1e-6);
}

TEST(RunOrder, NothingGivesWayWhereOneLives) {
  std::vector<Prompt> prompts = {{.comes = 0, .work = 10, .begins = {}, .ends = {}},
                                 {.comes = 1, .work = 2, .begins = {}, .ends = {}},
                                 {.comes = 2, .work = 1, .begins = {}, .ends = {}}};
  Pool({.most_live = 1}, prompts).Run();
  EXPECT_NEAR(*prompts[0].ends, 10, 1e-6);
  EXPECT_NEAR(*prompts[2].ends, 11, 1e-6);
  EXPECT_NEAR(*prompts[1].ends, 13, 1e-6);
}

// What is predicted of a prompt that comes is what happens, if nothing else comes.
// Ranks change while prompts wait, and are looked at again each 0.1 s: so some turn may come otherwise.
TEST(RunOrder, PredictsTheWait) {
  std::mt19937_64 random(TestSeed());
  int wrong = 0;
  for (int draw = 0; draw < 200; ++draw) {
    RunOrder order({.max_age = absl::Hours(1), .most_live = Draw(random, 1, 8)});
    std::map<Ticket, double> rest;
    double now = 0;
    const auto compute = [&](double seconds) {
      while (seconds > 1e-9 && !rest.empty()) {
        const Ticket ticket = order.Choose(At(now));
        const double step = std::min(seconds, rest.at(ticket));
        now += step;
        seconds -= step;
        rest.at(ticket) -= step;
        if (rest.at(ticket) > 1e-9) continue;
        order.Remove(ticket, At(now));
        rest.erase(ticket);
      }
    };
    const auto add = [&](Ticket ticket, const RunOrder::Job& job) {
      order.Announce(ticket, job, At(now));
      order.Complete(ticket, At(now));
      rest[ticket] = job.work_seconds;
    };
    const auto random_job = [&] {
      return RunOrder::Job{
          .tenant = "t",
          .priority = Draw(random, -1, 1),
          .work_seconds = std::uniform_real_distribution<double>(0.01, 10)(random)};  // no two alike
    };
    for (Ticket ticket = 1; ticket <= 8; ++ticket) {
      add(ticket, random_job());
      compute(Draw(random, 0, 300) / 100.0);
    }
    const RunOrder::Job job = random_job();
    const double predicted = order.WaitSeconds(job, At(now));
    const double added_at = now;
    add(11, job);
    while (order.Choose(At(now)) != 11) compute(0.01);
    if (std::abs(now - added_at - predicted) > 0.02 + 1e-6) ++wrong;
  }
  EXPECT_LE(wrong, 4) << "of 200";
}

// Short prompts have half of the time. A longer one that comes is told when it ends if they keep coming, and
// they do. Where nothing gives way it waits for those alone that come before it begins.
TEST(RunOrder, PredictsForPromptsThatKeepComing) {
  std::mt19937_64 random(TestSeed());
  constexpr double kShort = 0.1;
  for (const int most_live : {1, 8}) {
    std::vector<double> of_likely, of_alone;
    for (int draw = 0; draw < 60; ++draw) {
      RunOrder order({.max_age = absl::Hours(1), .most_live = most_live});
      std::map<Ticket, double> rest;
      double now = 0, next = 0, long_ends = 0;
      Ticket last = 10;
      const auto come = [&](Ticket ticket, double work) {
        order.Announce(ticket, {.tenant = "t", .work_seconds = work}, At(now));
        order.Complete(ticket, At(now));
        rest[ticket] = work;
      };
      const auto pass = [&](double until) {
        while (now < until && (now < 400 || rest.contains(2))) {
          for (; next <= now; next += Exponential(random, 2 * kShort)) come(++last, kShort);
          const Ticket ticket = order.Choose(At(now));
          const double step = ticket == 0 ? next - now : std::min(rest.at(ticket), next - now);
          now += step;
          if (ticket == 0 || (rest.at(ticket) -= step) > 1e-9) continue;
          order.Remove(ticket, At(now));
          rest.erase(ticket);
          if (ticket == 2) long_ends = now;
        }
      };
      pass(400);
      come(1, 8);
      come(2, 10);
      const RunOrder::Turn turn = order.TurnsUpTo(2, At(now)).back();
      const double likely = now + order.LikelyEndSeconds(turn, At(now)), alone = now + turn.ends_seconds;
      const double came = now;
      pass(1e9);
      of_likely.push_back((likely - came) / (long_ends - came));
      of_alone.push_back((alone - came) / (long_ends - came));
    }
    EXPECT_NEAR(Percentile(of_likely, 0.5), 1, 0.15);
    EXPECT_LE(Percentile(of_alone, 0.5), most_live == 1 ? 0.75 : 0.65);
  }
}

// It has the devices in time for its deadline, whatever comes. Where that is lost, no end is before its own.
TEST(RunOrder, PredictsNoEndAfterADeadlineThatCanBeMet) {
  for (const double deadline : {5.0, 12.0, 14.0, 1000.0}) {
    RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
    order.Announce(1, {.tenant = "t", .work_seconds = 60}, At(0));
    order.Complete(1, At(0));
    EXPECT_EQ(order.Choose(At(0)), 1u);
    order.Remove(1, At(60));
    order.Announce(2, {.tenant = "t", .priority = -1, .work_seconds = 10, .deadline = At(60 + deadline)},
                   At(60));
    order.Complete(2, At(60));
    const RunOrder::Turn turn = order.TurnsUpTo(2, At(60)).back();
    EXPECT_NEAR(turn.ends_seconds, 10, 1e-6);
    const double expected = deadline < 10 ? 10 : std::min(deadline, 20.0);
    EXPECT_NEAR(order.LikelyEndSeconds(turn, At(60)), expected, 1e-6) << "half of the last two minutes";
  }
}

// The devices' time counts, not the prompts': two on halves of them have no more than one on all.
TEST(RunOrder, PredictsByTheTimeOfAllDevices) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  for (const Ticket ticket : {1, 2}) {
    order.Announce(ticket, {.tenant = "t", .work_seconds = 30, .submeshes = {{2, 30.5}}}, At(0));
    order.Complete(ticket, At(0));
  }
  order.Choose(At(0));
  ASSERT_EQ(order.computing().size(), 2u);
  ASSERT_EQ(order.submeshes(1), 2);
  for (const Ticket ticket : {1, 2}) order.Remove(ticket, At(30));
  order.Announce(3, {.tenant = "t", .work_seconds = 100}, At(30));
  order.Complete(3, At(30));
  const RunOrder::Turn turn = order.TurnsUpTo(3, At(30)).back();
  EXPECT_NEAR(order.LikelyEndSeconds(turn, At(30)), 100 / (1 - 0.25), 1e-6);
}

TEST(RunOrder, AWeightIsAShare) {
  for (const double weight : {0.25, 1.0, 3.0}) {
    std::vector<Prompt> prompts;
    for (int i = 0; i < 200; ++i) {
      prompts.push_back({.comes = 0.001 * i,
                         .work = 0.5,
                         .tenant = i % 2 == 0 ? "weighted" : "other",
                         .weight = i % 2 == 0 ? weight : 1,
                         .begins = {},
                         .ends = {}});
    }
    Pool pool({.max_age = absl::Hours(1), .most_live = 8}, prompts);
    std::map<std::string, double> computed;
    pool.on_computed = [&](const Prompt& prompt, double begin, double end) {
      if (std::max(computed["weighted"], computed["other"]) < 45) computed[prompt.tenant] += end - begin;
    };
    pool.Run();
    EXPECT_NEAR(computed["weighted"] / (computed["weighted"] + computed["other"]), weight / (1 + weight),
                0.04);
  }
}

// Deadlines that can be met one after the other are met, though there is more of shorter prompts than the
// pool can do.
TEST(RunOrder, DeadlinesThatCanBeMetAreMet) {
  std::mt19937_64 random(TestSeed());
  int missed_without = 0;
  for (int draw = 0; draw < 30; ++draw) {
    std::vector<Prompt> prompts;
    double due_seconds = 0;
    for (int i = 0; i < 8; ++i) {
      const double work = Draw(random, 2000, 8000) / 1000.0;
      due_seconds += 1.4 * work;
      prompts.push_back({.comes = 0.001 * i,
                         .work = work,
                         .tenant = "t",
                         .deadline = due_seconds + 0.1 + Draw(random, 0, 3000) / 1000.0,
                         .begins = {},
                         .ends = {}});
    }
    const size_t due = prompts.size();
    for (double now = 0; now < due_seconds; now += Exponential(random, 0.4)) {
      prompts.push_back(
          {.comes = now, .work = Draw(random, 50, 1500) / 1000.0, .tenant = "t", .begins = {}, .ends = {}});
    }
    std::shuffle(prompts.begin(), prompts.begin() + static_cast<std::ptrdiff_t>(due), random);
    std::vector<Prompt> without = prompts;
    for (size_t i = 0; i < due; ++i) without[i].deadline = std::numeric_limits<double>::infinity();
    const RunOrder::Options options{.max_age = absl::Hours(1), .most_live = 64};
    Pool(options, prompts).Run();
    Pool(options, without).Run();
    for (size_t i = 0; i < due; ++i) {
      EXPECT_LE(*prompts[i].ends, prompts[i].deadline) << "work " << prompts[i].work;
      missed_without += *without[i].ends > prompts[i].deadline ? 1 : 0;
    }
  }
  EXPECT_GT(missed_without, 100) << "of 240: the deadlines are too easy to show anything";
}

// What cannot be met any more has no turn before others.
TEST(RunOrder, ALostDeadlineGivesNoTurn) {
  for (const bool lost : {true, false}) {
    std::vector<Prompt> prompts = {
        {.comes = 0, .work = 10, .tenant = "t", .deadline = lost ? 9.0 : 12.0, .begins = {}, .ends = {}},
        {.comes = 0, .work = 4, .tenant = "t", .begins = {}, .ends = {}}};
    Pool({.most_live = 8}, prompts).Run();
    EXPECT_NEAR(*prompts[1].ends, lost ? 4 : 14, 1e-6);
  }
}

// Of urgent ones the earliest deadline goes first, though another is shorter: it was urgent for the sake of a
// third, which has left.
TEST(RunOrder, TheEarliestUrgentDeadlineGoesFirst) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  const auto come = [&](Ticket ticket, double work, double deadline, double now) {
    order.Announce(ticket, {.tenant = "t", .work_seconds = work, .deadline = At(deadline)}, At(now));
    order.Complete(ticket, At(now));
  };
  come(1, 2, 20, 0);
  come(2, 10, 20.1, 0);
  EXPECT_EQ(order.Choose(At(6)), 1u) << "the other follows it, and takes 10";
  order.Remove(2, At(6));
  come(3, 4, 10.5, 6);
  EXPECT_EQ(order.Choose(At(6)), 3u);
}

// A tenant that has had a little more than another has urgent turns all the same.
TEST(RunOrder, ALittleLeadLosesNoDeadline) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  order.Announce(1, {.tenant = "a", .work_seconds = 1}, At(0));
  order.Announce(2, {.tenant = "b", .work_seconds = 2}, At(0));
  order.Announce(3, {.tenant = "a", .work_seconds = 4, .deadline = At(6)}, At(0));
  for (const Ticket ticket : {1, 2, 3}) order.Complete(ticket, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Remove(1, At(1));
  EXPECT_EQ(order.Choose(At(1)), 3u) << "it cannot wait for a shorter one";
}

// Nor has what was urgent and turns out to take too long.
TEST(RunOrder, ADeadlineThatGetsLostGivesNoTurnAnyMore) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  order.Announce(1, {.tenant = "t", .work_seconds = 10, .deadline = At(12)}, At(0));
  order.Announce(2, {.tenant = "t", .work_seconds = 4}, At(0));
  order.Complete(1, At(0));
  order.Complete(2, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u) << "it cannot wait";
  EXPECT_EQ(order.Choose(At(4)), 1u);
  order.SetDone(1, 0.1, At(4));
  EXPECT_EQ(order.Choose(At(4)), 2u) << "36 s are left of it";
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

TEST(RunOrder, AFloodOfTightDeadlinesLeavesTheOtherItsHalf) {
  std::vector<Prompt> prompts;
  for (int i = 0; i < 200; ++i) {
    const double comes = 0.5 * i;
    prompts.push_back(
        {.comes = comes, .work = 1, .tenant = "flood", .deadline = comes + 1.4, .begins = {}, .ends = {}});
    prompts.push_back({.comes = comes, .work = 1, .tenant = "other", .begins = {}, .ends = {}});
  }
  Pool pool({.max_age = absl::Hours(1), .most_live = 8}, prompts);
  std::map<std::string, double> computed;
  pool.on_computed = [&](const Prompt& prompt, double begin, double end) {
    if (end < 100) computed[prompt.tenant] += end - begin;
  };
  pool.Run();
  EXPECT_GE(computed["other"] / (computed["other"] + computed["flood"]), 0.45);
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

// Time that it computes is no time that it waits: only waiting makes a prefill old.
TEST(RunOrder, WhatComputesForLongGetsNoOlder) {
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

// Nobody is owed the time before it came: its long prompt waits for the others' short ones.
TEST(RunOrder, WhoComesLateStartsWhereTheOthersStand) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 1});
  double now = 0;
  Ticket ticket = 0;
  for (; now < 100; now += 1) {  // never idle
    order.Announce(++ticket, {.tenant = "busy", .work_seconds = 1}, At(now));
    order.Complete(ticket, At(now));
    if (ticket > 1) order.Remove(ticket - 1, At(now));
    EXPECT_EQ(order.Choose(At(now)), ticket);
  }
  order.Announce(1000, {.tenant = "late", .work_seconds = 3}, At(now));
  order.Complete(1000, At(now));
  order.Announce(1001, {.tenant = "busy", .work_seconds = 1}, At(now));
  order.Complete(1001, At(now));
  order.Remove(ticket, At(now));
  EXPECT_EQ(order.Choose(At(now)), 1001u);
}

// Who used ranks that stood idle owes nothing for it.
TEST(RunOrder, IdleRanksAreForgotten) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 1});
  for (const Ticket ticket : {1, 2}) {  // its upload stays, so that the tenant does
    order.Announce(ticket, {.tenant = "greedy", .work_seconds = 1000}, At(0));
  }
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Remove(1, At(1000));
  order.Announce(3, {.tenant = "greedy", .work_seconds = 1}, At(1001));
  order.Announce(4, {.tenant = "other", .work_seconds = 2}, At(1001));
  order.Complete(4, At(1001));
  order.Complete(3, At(1001));
  EXPECT_EQ(order.Choose(At(1001)), 3u) << "the shorter one";
}

// The leads of very many tenants are not all kept: who is not here begins anew.
TEST(RunOrder, TooManyTenantsAreForgotten) {
  constexpr Ticket kTenants = 4200;
  RunOrder order({.max_age = absl::Hours(10000), .most_live = 1});
  const Ticket stays = kTenants + 1;
  order.Announce(stays, {.tenant = "stays", .priority = -2, .work_seconds = 1e6}, At(0));
  order.Complete(stays, At(0));
  double now = 0;
  for (Ticket ticket = 1; ticket <= kTenants; ++ticket) {
    order.Announce(ticket, {.tenant = std::to_string(ticket), .work_seconds = 100}, At(now));
    order.Complete(ticket, At(now));
    ASSERT_EQ(order.Choose(At(now)), ticket);
    order.Remove(ticket, At(now += 100));
  }
  // One of the first and one who was never here: the shorter goes first, for neither has a lead.
  order.Announce(kTenants + 2, {.tenant = "1", .work_seconds = 1}, At(now));
  order.Announce(kTenants + 3, {.tenant = "new", .work_seconds = 2}, At(now));
  order.Complete(kTenants + 2, At(now));
  order.Complete(kTenants + 3, At(now));
  EXPECT_EQ(order.Choose(At(now)), kTenants + 2);
}

TEST(RunOrder, TenantsThatAreGoneAreForgotten) {
  RunOrder order({.most_live = 8});
  double now = 0;
  for (Ticket ticket = 1; ticket <= 10; ++ticket) {
    order.Announce(ticket, {.tenant = std::to_string(ticket), .work_seconds = 1}, At(now));
    order.Complete(ticket, At(now));
    EXPECT_EQ(order.Choose(At(now)), ticket);
    order.Remove(ticket, At(now += 1));
  }
  EXPECT_TRUE(order.Turns(At(now)).empty());
  EXPECT_EQ(order.Choose(At(now)), 0u);
}

}  // namespace
}  // namespace meshfill
