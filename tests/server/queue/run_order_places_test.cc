// Places and memory that are scarce, in virtual time: the last place, and who waits for memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "server/queue/run_order.h"
#include "tests/server/queue/run_order_pool.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;

// Long prompts of other tenants have begun, so many as may: a short one that comes waits for no end of
// theirs.
TEST(RunOrderPlaces, TheLastPlaceIsKeptForAShortOne) {
  std::vector<Prompt> prompts;
  for (const char* tenant : {"a", "b", "c"}) {
    prompts.push_back({.comes = 0, .work = 100, .tenant = tenant, .begins = {}, .ends = {}});
  }
  prompts.push_back({.comes = 60, .work = 0.1, .tenant = "d", .begins = {}, .ends = {}});
  OrderedPool pool({.max_age = absl::Hours(1), .most_live = 3}, prompts);
  pool.look_seconds = 0.05;
  pool.Run();
  EXPECT_LE(*prompts[0].begins, 0.1);
  EXPECT_LE(*prompts[1].begins, 60) << "both live";
  EXPECT_GE(*prompts[2].begins, std::min(*prompts[0].ends, *prompts[1].ends));
  EXPECT_LE(*prompts[3].ends, 60.2);
}

// Who asks for its wait is told of that place.
TEST(RunOrderPlaces, PredictsTheWaitForAPlace) {
  RunOrder order({.max_age = absl::Hours(1), .most_live = 2});
  order.Announce(1, {.tenant = "t", .work_seconds = 10}, At(0));
  order.Complete(1, At(0));
  EXPECT_EQ(order.Choose(At(0)), 1u);
  EXPECT_EQ(order.WaitSeconds({.tenant = "t", .priority = 1, .work_seconds = 4.9}, At(0)), 0);
  EXPECT_NEAR(order.WaitSeconds({.tenant = "t", .priority = 1, .work_seconds = 5.1}, At(0)), 10, 1e-6);
}

TEST(RunOrderPlaces, WhatIsBeingStoppedKeepsNobodyFromTheLastPlace) {
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
TEST(RunOrderPlaces, ShortOnesDoNotWaitForAgedOnesThatWaitForMemory) {
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
TEST(RunOrderPlaces, ShortOnesBeginBeforeWhoWaitsForMemory) {
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
TEST(RunOrderPlaces, ShortOnesDoNotStarveWhoWaitsForMemory) {
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

}  // namespace
}  // namespace meshfill
