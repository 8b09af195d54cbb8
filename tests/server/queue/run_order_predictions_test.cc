// What prompts that come are told of their wait and of their end, in virtual time, and what happens then.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "server/queue/run_order.h"
#include "tests/engine/random_seed.h"
#include "tests/server/queue/run_order_pool.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;

// What is predicted of a prompt that comes is what happens, if nothing else comes.
// Ranks change while prompts wait, and are looked at again each 0.1 s: so some turn may come otherwise.
TEST(RunOrderPredictions, PredictsTheWait) {
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

// What waits for an aged prompt hears of its wait what will be; but for a few, where a moment decides whether
// a short one still is beside what is left of the aged one.
TEST(RunOrderPredictions, PredictsTheWaitForAnAgedOne) {
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

// The credit that lets one go before an aged prompt is gone when that one has ended.
TEST(RunOrderPredictions, PredictsThatACreditIsSpent) {
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

// Short prompts have half of the time. A longer one that comes is told when it ends if they keep coming, and
// they do. Where nothing gives way it waits for those alone that come before it begins.
TEST(RunOrderPredictions, PredictsForPromptsThatKeepComing) {
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
TEST(RunOrderPredictions, PredictsNoEndAfterADeadlineThatCanBeMet) {
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
TEST(RunOrderPredictions, PredictsByTheTimeOfAllDevices) {
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

}  // namespace
}  // namespace meshfill
