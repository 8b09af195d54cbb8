// Deadlines, in virtual time: those that can be met are, and nobody else pays for those that cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "server/queue/run_order.h"
#include "tests/engine/random_seed.h"
#include "tests/server/queue/run_order_pool.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;

// Deadlines that can be met one after the other are met, though there is more of shorter prompts than the
// pool can do.
TEST(RunOrderDeadlines, DeadlinesThatCanBeMetAreMet) {
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
    OrderedPool(options, prompts).Run();
    OrderedPool(options, without).Run();
    for (size_t i = 0; i < due; ++i) {
      EXPECT_LE(*prompts[i].ends, prompts[i].deadline) << "work " << prompts[i].work;
      missed_without += *without[i].ends > prompts[i].deadline ? 1 : 0;
    }
  }
  EXPECT_GT(missed_without, 100) << "of 240: the deadlines are too easy to show anything";
}

// What cannot be met any more has no turn before others.
TEST(RunOrderDeadlines, ALostDeadlineGivesNoTurn) {
  for (const bool lost : {true, false}) {
    std::vector<Prompt> prompts = {
        {.comes = 0, .work = 10, .tenant = "t", .deadline = lost ? 9.0 : 12.0, .begins = {}, .ends = {}},
        {.comes = 0, .work = 4, .tenant = "t", .begins = {}, .ends = {}}};
    OrderedPool({.most_live = 8}, prompts).Run();
    EXPECT_NEAR(*prompts[1].ends, lost ? 4 : 14, 1e-6);
  }
}

// Of urgent ones the earliest deadline goes first, though another is shorter: it was urgent for the sake of a
// third, which has left.
TEST(RunOrderDeadlines, TheEarliestUrgentDeadlineGoesFirst) {
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
TEST(RunOrderDeadlines, ALittleLeadLosesNoDeadline) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 8});
  order.Announce(1, {.tenant = "a", .work_seconds = 1}, At(0));
  order.Announce(2, {.tenant = "b", .work_seconds = 2}, At(0));
  order.Announce(3, {.tenant = "a", .work_seconds = 4, .deadline = At(6)}, At(0));
  for (const Ticket ticket : {1, 2, 3}) order.Complete(ticket, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  order.Remove(1, At(1));
  EXPECT_EQ(order.Choose(At(1)), 3u) << "it cannot wait for a shorter one";
}

// What was urgent, and turns out to take too long, has no turn before others any more.
TEST(RunOrderDeadlines, ADeadlineThatGetsLostGivesNoTurnAnyMore) {
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

TEST(RunOrderDeadlines, AFloodOfTightDeadlinesLeavesTheOtherItsHalf) {
  std::vector<Prompt> prompts;
  for (int i = 0; i < 200; ++i) {
    const double comes = 0.5 * i;
    prompts.push_back(
        {.comes = comes, .work = 1, .tenant = "flood", .deadline = comes + 1.4, .begins = {}, .ends = {}});
    prompts.push_back({.comes = comes, .work = 1, .tenant = "other", .begins = {}, .ends = {}});
  }
  OrderedPool pool({.max_age = absl::Hours(1), .most_live = 8}, prompts);
  std::map<std::string, double> computed;
  pool.on_computed = [&](const Prompt& prompt, double begin, double end) {
    if (end < 100) computed[prompt.tenant] += end - begin;
  };
  pool.Run();
  EXPECT_GE(computed["other"] / (computed["other"] + computed["flood"]), 0.45);
}

}  // namespace
}  // namespace meshfill
