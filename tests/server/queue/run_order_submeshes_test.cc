// The order of prefills that may run side by side on sub-meshes, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "server/queue/run_order.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;

constexpr int kWorkers = 4;

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

// A prompt that n times the devices make n^`power` times as fast.
RunOrder::Job JobOf(double seconds_on_all, double power) {
  return {.work_seconds = seconds_on_all,
          .submeshes = {{.submeshes = 2, .seconds = seconds_on_all * std::pow(2, power)},
                        {.submeshes = 4, .seconds = seconds_on_all * std::pow(4, power)}}};
}

class Order {
 public:
  explicit Order(int most_live = 8) : order_({.max_age = absl::Hours(1), .most_live = most_live}) {}

  Ticket Add(const RunOrder::Job& job, double now) {
    const Ticket ticket = ++last_;
    order_.Announce(ticket, job, At(now));
    order_.Complete(ticket, At(now));
    jobs_[ticket] = job;
    rest_[ticket] = 1;
    return ticket;
  }

  // Computes until `until` or the end. The ends, by ticket.
  void Run(double& now, double until) {
    while (now < until && !rest_.empty()) {
      order_.Choose(At(now));
      const std::vector<Ticket> computing = order_.computing();
      ASSERT_FALSE(computing.empty()) << "nobody computes, though somebody waits";
      const int submeshes = order_.submeshes(computing.front());
      ASSERT_LE(std::ssize(computing), submeshes);
      double step = std::min(until - now, 0.05);  // a queue looks as often
      for (const Ticket ticket : computing) {
        ASSERT_EQ(order_.submeshes(ticket), submeshes) << "devices are dealt twice";
        const auto [first, fresh] = submeshes_.emplace(ticket, submeshes);
        ASSERT_EQ(first->second, submeshes) << "a prefill that lives moves to other devices";
        step = std::min(step, rest_.at(ticket) * jobs_.at(ticket).SecondsOn(submeshes));
      }
      now += step;
      for (const Ticket ticket : computing) {
        if (!begins_.contains(ticket)) begins_[ticket] = now - step;
        double& rest = rest_.at(ticket);
        rest -= step / jobs_.at(ticket).SecondsOn(submeshes);
        if (rest > 1e-9) continue;
        rest_.erase(ticket);
        ends_[ticket] = now;
        order_.Remove(ticket, At(now));
      }
    }
  }

  RunOrder order_;
  std::map<Ticket, RunOrder::Job> jobs_;
  std::map<Ticket, double> rest_;  // share of the work
  std::map<Ticket, double> begins_, ends_;
  std::map<Ticket, int> submeshes_;
  Ticket last_ = 0;
};

TEST(RunOrderSubmeshes, ALoneOneTakesAllDevices) {
  Order order;
  order.Add(JobOf(1, 0.1), 0);
  double now = 0;
  order.Run(now, 10);
  EXPECT_EQ(order.submeshes_.at(1), 1);
}

TEST(RunOrderSubmeshes, ShortOnesThatGainLittleRunSideBySide) {
  Order order;
  for (int i = 0; i < kWorkers; ++i) order.Add(JobOf(1, 0.5), 0);
  double now = 0;
  order.Run(now, 100);
  for (const auto& [ticket, end] : order.ends_) EXPECT_NEAR(end, 2, 1e-6) << ticket;
}

// Four times the devices, almost four times as fast: the mean end is earlier in turn.
TEST(RunOrderSubmeshes, LongOnesThatGainMuchRunInTurn) {
  Order order;
  for (int i = 0; i < kWorkers; ++i) order.Add(JobOf(1, 0.98), 0);
  double now = 0;
  order.Run(now, 100);
  for (const auto& [ticket, end] : order.ends_) EXPECT_NEAR(end, static_cast<double>(ticket), 1e-6);
}

// Sub-meshes of two of four workers are best where these make a prompt fast, and all four hardly faster.
TEST(RunOrderSubmeshes, TheBestSizeIsTaken) {
  Order order;
  const RunOrder::Job job = {
      .work_seconds = 1, .submeshes = {{.submeshes = 2, .seconds = 1.1}, {.submeshes = 4, .seconds = 2.2}}};
  for (int i = 0; i < 8; ++i) order.Add(job, 0);
  double now = 0;
  order.Run(now, 100);
  EXPECT_EQ(order.submeshes_.at(1), 2);
  EXPECT_NEAR(now, 4.4, 1e-6);
}

TEST(RunOrderSubmeshes, AMuchLongerOneIsNotPutBesideShortOnes) {
  Order order;
  order.Add(JobOf(100, 0.5), 0);
  for (int i = 0; i < kWorkers; ++i) order.Add(JobOf(1, 0.5), 0);
  double now = 0;
  order.Run(now, 1000);
  EXPECT_EQ(order.submeshes_.at(1), 1);
  EXPECT_EQ(order.submeshes_.at(2), 4);
  EXPECT_NEAR(order.ends_.at(4), 2, 1e-6);
  EXPECT_NEAR(now, 102, 1e-6);
}

// It would miss it there, and meets it on all devices; whether it is the first, or another is.
TEST(RunOrderSubmeshes, ASubmeshLosesNobodysDeadline) {
  for (const Ticket hurried : {1, 2}) {
    for (const double deadline : {21.0, 60.0}) {
      Order order;
      for (Ticket ticket = 1; ticket <= 8; ++ticket) {
        RunOrder::Job job = {.work_seconds = 10, .submeshes = {{.submeshes = 4, .seconds = 22.5}}};
        if (ticket == hurried) job.deadline = At(deadline);
        order.Add(job, 0);
      }
      double now = 0;
      order.Run(now, 200);
      EXPECT_EQ(order.submeshes_.at(hurried), deadline == 21 ? 1 : 4);
      EXPECT_LE(order.ends_.at(hurried), deadline);
      EXPECT_EQ(order.submeshes_.at(3), 4) << "the others gain by it";
    }
  }
}

// Behind one that waits for memory only one of them may begin: alone on a sub-mesh it would leave the others'
// devices idle.
TEST(RunOrderSubmeshes, WhoBeginsBeforeOneThatWaitsForMemoryHasAllDevices) {
  for (const bool waits : {false, true}) {
    Order order;
    order.Add({.work_seconds = 1000}, 0);
    double now = 0;
    order.Run(now, 1);
    if (waits) {
      const Ticket large = order.Add({.priority = 2, .work_seconds = 500}, now);
      order.Run(now, now + 0.1);
      order.order_.PutBack(large, At(now));
    }
    std::vector<Ticket> shorter;
    for (int i = 0; i < 4; ++i) {
      shorter.push_back(order.Add(
          {.priority = 1, .work_seconds = 10, .submeshes = {{.submeshes = 4, .seconds = 22.5}}}, now));
    }
    order.Run(now, now + 1);
    EXPECT_EQ(order.submeshes_.at(shorter.front()), waits ? 1 : 4);
  }
}

// One that comes when those on sub-meshes are about to end gains more by all devices.
TEST(RunOrderSubmeshes, OneThatComesLateWaitsForAllDevices) {
  for (const bool late : {false, true}) {
    Order order;
    for (int i = 0; i < 3; ++i) order.Add(JobOf(1, 0.3), 0);
    double now = 0;
    order.Run(now, late ? 1.4 : 0.1);
    ASSERT_EQ(order.submeshes_.at(1), 4);
    order.Add(JobOf(1, 0.3), now);
    order.Run(now, 100);
    EXPECT_EQ(order.submeshes_.at(4), late ? 1 : 4);
    EXPECT_NEAR(order.ends_.at(4), late ? std::pow(4, 0.3) + 1 : std::pow(4, 0.3) + 0.1, 1e-6);
  }
}

// Of two halves one has a prompt that computes and one that gave way to it. When the other half gets free,
// whoever waits takes it, and not the one that stands still in the first.
TEST(RunOrderSubmeshes, TwoOnTheSameSubmeshTakeTurns) {
  Order order;
  const RunOrder::Job longer = {.work_seconds = 9, .submeshes = {{.submeshes = 2, .seconds = 10}}};
  const RunOrder::Job shorter = {.work_seconds = 1.8, .submeshes = {{.submeshes = 2, .seconds = 2}}};
  using Tickets = std::vector<Ticket>;
  const Ticket gave_way = order.Add(longer, 0), beside = order.Add(longer, 0);
  order.order_.Choose(At(0));
  ASSERT_EQ(order.order_.computing(), (Tickets{gave_way, beside}));
  order.order_.SetPlace(gave_way, 1);
  order.order_.SetPlace(beside, 2);
  const Ticket computes = order.Add(shorter, 1);
  order.order_.Choose(At(1));
  ASSERT_EQ(order.order_.computing(), (Tickets{computes, gave_way}));
  order.order_.SetPlace(computes, 2);  // the place of the one that stands still
  order.order_.Choose(At(1.5));
  EXPECT_EQ(order.order_.computing(), (Tickets{computes, gave_way}));
  order.order_.Remove(gave_way, At(2));
  order.order_.Choose(At(2));
  EXPECT_EQ(order.order_.computing(), Tickets{computes}) << "the other one shares its place";
  const Ticket waits = order.Add(shorter, 2);
  order.order_.Choose(At(2));
  EXPECT_EQ(order.order_.computing(), (Tickets{computes, waits}));
  order.order_.Remove(waits, At(2.5));
  order.order_.Remove(computes, At(3));
  order.order_.Choose(At(3));
  EXPECT_EQ(order.order_.computing(), Tickets{beside});
}

TEST(RunOrderSubmeshes, NoMoreBeginThanMayLive) {
  Order order(/*most_live=*/2);
  for (int i = 0; i < 6; ++i) order.Add(JobOf(1, 0.2), 0);
  double now = 0;
  while (!order.rest_.empty()) {
    order.Run(now, now + 0.1);
    ASSERT_LE(order.order_.live(), 2);
  }
}

// Each sub-mesh has one that computes, and a short one that comes waits for no end.
TEST(RunOrderSubmeshes, AShortOneFindsAPlaceBesideThem) {
  Order order(kWorkers + 1);
  for (int i = 0; i < kWorkers + 1; ++i) order.Add(JobOf(10, 0.5), 0);
  double now = 0;
  order.Run(now, 1);
  ASSERT_EQ(order.order_.live(), kWorkers) << "the last place is for a short one";
  const Ticket comes = order.Add(JobOf(0.1, 0.5), now);
  order.Run(now, 2);
  EXPECT_NEAR(order.begins_.at(comes), 1, 1e-6);
}

// Where two may live beside a short one, two sub-meshes are as many as can be used.
TEST(RunOrderSubmeshes, OnlyThoseThatMayLiveAreWeighed) {
  for (const bool few : {true, false}) {
    Order order(few ? 3 : 5);
    const RunOrder::Job job = {.work_seconds = 1, .submeshes = {{.submeshes = 4, .seconds = 2}}};
    for (int i = 0; i < 8; ++i) order.Add(job, 0);
    double now = 0;
    order.Run(now, 100);
    EXPECT_EQ(order.submeshes_.at(1), few ? 1 : 4) << "two at once that take 2 s end later than in turn";
  }
}

// What is told of the turns to come is what happens where nothing else comes, whatever lives already; but for
// a few, where a moment decides who is first.
TEST(RunOrderSubmeshes, WhatIsToldIsWhatHappens) {
  std::mt19937_64 random(TestSeed());
  int told = 0, wrong = 0;
  for (int draw = 0; draw < 200; ++draw) {
    Order order(Draw(random, 2, 8));
    double now = 0;
    const int before = Draw(random, 0, 4), after = Draw(random, 1, 12);
    const auto add = [&](int count) {
      for (int i = 0; i < count; ++i) {
        order.Add(JobOf(Draw(random, 100, 4000) / 1000.0, Draw(random, 5, 100) / 100.0), now);
      }
    };
    add(before);
    order.Run(now, Draw(random, 0, 20) / 10.0);
    add(after);
    const std::vector<RunOrder::Turn> turns = order.order_.Turns(At(now));
    const double told_at = now, most_wait = order.order_.MostWaitSeconds(At(now));
    const auto begins_before = order.begins_;
    order.Run(now, std::numeric_limits<double>::infinity());
    double all = 0;
    for (const auto& [ticket, end] : order.ends_) all = std::max(all, end - told_at);
    for (const RunOrder::Turn& turn : turns) {
      EXPECT_LE(turn.begins_seconds, most_wait + 1e-6);
      const bool begins_right =
          begins_before.contains(turn.ticket) ||
          std::abs(turn.begins_seconds - order.begins_.at(turn.ticket) + told_at) < 0.1 * all + 0.01;
      const bool ends_right =
          std::abs(turn.ends_seconds - order.ends_.at(turn.ticket) + told_at) < 0.1 * all + 0.01;
      ++told;
      if (!begins_right || !ends_right || turn.submeshes != order.submeshes_.at(turn.ticket)) ++wrong;
    }
  }
  EXPECT_LE(wrong, told / 10) << "of " << told;
}

// Tokens per second rise, and nobody's slowdown does, where many short prompts wait at once.
TEST(RunOrderSubmeshes, ManyShortOnesEndSooner) {
  const auto end_of = [](bool with_submeshes) {
    Order order;
    for (int i = 0; i < 64; ++i) {
      RunOrder::Job job = JobOf(1, 0.5);
      if (!with_submeshes) job.submeshes.clear();
      order.Add(job, 0);
    }
    double now = 0;
    order.Run(now, 1000);
    return now;
  };
  EXPECT_NEAR(end_of(true), 0.5 * end_of(false), 1e-6);
}

// A tenant is owed devices, not seconds: on a quarter of the pool a second is a quarter.
TEST(RunOrderSubmeshes, LeadsCountTheShareOfTheDevices) {
  Order order;
  for (int i = 0; i < 200; ++i) {
    RunOrder::Job on_all = {.tenant = "on all", .work_seconds = 1};
    RunOrder::Job beside = JobOf(1, 0.5);
    beside.tenant = "beside";
    order.Add(on_all, 0);
    order.Add(beside, 0);
  }
  double now = 0;
  order.Run(now, 100);
  std::map<std::string, double> pool_seconds;
  for (const auto& [ticket, end] : order.ends_) {
    const RunOrder::Job& job = order.jobs_.at(ticket);
    const int submeshes = order.submeshes_.at(ticket);
    pool_seconds[job.tenant] += job.SecondsOn(submeshes) / submeshes;
  }
  EXPECT_EQ(order.submeshes_.at(2), 4);
  EXPECT_NEAR(pool_seconds["on all"], 50, 10);
  EXPECT_NEAR(pool_seconds["beside"], 50, 10);
}

}  // namespace
}  // namespace meshfill
