// Tenants, in virtual time: each has its share while it wants it, and the past is forgotten.
#include <gtest/gtest.h>

#include <algorithm>
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

TEST(RunOrderTenants, AFloodOfOneTenantLeavesTheOtherItsHalf) {
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
    OrderedPool pool({.max_age = absl::Hours(1), .most_live = 8}, prompts);
    std::map<std::string, double> computed;
    pool.on_computed = [&](const Prompt& prompt, double begin, double end) {
      if (begin >= 5 && computed["other"] < 99) computed[prompt.tenant] += end - begin;
    };
    pool.Run();
    EXPECT_GE(computed["other"] / (computed["other"] + computed["flood"]), 0.45)
        << "prompts of " << others_work << " s";
  }
}

TEST(RunOrderTenants, AWeightIsAShare) {
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
    OrderedPool pool({.max_age = absl::Hours(1), .most_live = 8}, prompts);
    std::map<std::string, double> computed;
    pool.on_computed = [&](const Prompt& prompt, double begin, double end) {
      if (std::max(computed["weighted"], computed["other"]) < 45) computed[prompt.tenant] += end - begin;
    };
    pool.Run();
    EXPECT_NEAR(computed["weighted"] / (computed["weighted"] + computed["other"]), weight / (1 + weight),
                0.04);
  }
}

// Nobody is owed the time before it came: its long prompt waits for the others' short ones.
TEST(RunOrderTenants, WhoComesLateStartsWhereTheOthersStand) {
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
TEST(RunOrderTenants, IdleRanksAreForgotten) {
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
TEST(RunOrderTenants, TooManyTenantsAreForgotten) {
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

TEST(RunOrderTenants, TenantsThatAreGoneAreForgotten) {
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
