#include "engine/schedule/multi_ring_schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/plan/cost_model.h"
#include "engine/schedule/optimal_schedule.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/lockstep_mesh.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// One message on one of the links that rings share: its bytes still to move.
struct OnLink {
  size_t message;
  int link;
  double begins, left, alone, moves, flows;
};

// A rank's time in small steps of time, from the start of each message and the end of each step. Written from
// schedule.h and messages_under_way.h.
double SecondsOf(const Schedule& schedule, const RingSeconds& seconds, double tick) {
  double now = 0;
  int kv = 0;
  std::vector<double> least_arrival;  // by message
  std::vector<OnLink> moving;
  std::multimap<size_t, size_t> last_step;  // the messages that a step ends
  const auto wait_until = [&](auto&& over) {
    while (!over()) {
      std::array<double, kSharedLinks> flows = {};
      for (const OnLink& each : moving) {
        if (each.begins <= now && each.left > 0) flows[each.link] += each.flows;
      }
      for (OnLink& each : moving) {
        if (each.begins > now || each.left <= 0) continue;
        each.left -= tick / std::max(each.alone, each.moves * flows[each.link] / each.flows);
      }
      now += tick;
    }
  };
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    if (step.comm.has_value()) {
      const bool outer =
          step.comm == Traffic::kKv && KvHopOf(schedule.tile, schedule.kv_inner, kv++).ring == Ring::kKvOuter;
      const MessageSeconds message = step.comm == Traffic::kQ   ? seconds.q
                                     : step.comm == Traffic::kO ? seconds.o
                                     : outer                    ? seconds.kv_outer
                                                                : seconds.kv;
      for (int link = 0; link < kSharedLinks; ++link) {
        const auto& [start, moves, flows] = message.shared[link];
        if (moves == 0) continue;
        moving.push_back({least_arrival.size(), link, now + start, 1, message.total - start, moves, flows});
      }
      last_step.emplace(i + step.spans - 1, least_arrival.size());
      least_arrival.push_back(now + message.total);
    }
    const double blocks_end = now + static_cast<double>(step.blocks.size()) * seconds.block;
    wait_until([&] { return now >= blocks_end; });
    const auto [first, last] = last_step.equal_range(i);
    for (auto each = first; each != last; ++each) {
      const size_t message = each->second;
      wait_until([&] {
        return now >= least_arrival[message] &&
               std::none_of(moving.begin(), moving.end(),
                            [&](const OnLink& on) { return on.message == message && on.left > 0; });
      });
    }
  }
  return now;
}

// By the code that plans. A test holds it to the one above.
double PlannedSecondsOf(const Schedule& schedule, const RingSeconds& seconds) {
  const AttentionSeconds layer = {
      .tile = schedule.tile,
      .kv_inner = schedule.kv_inner,
      .block = seconds.block,
      .transfer = {{Traffic::kQ, seconds.q}, {Traffic::kKv, seconds.kv}, {Traffic::kO, seconds.o}},
      .kv_outer = seconds.kv_outer};
  return layer.Wait(schedule) + layer.Compute();
}

// `apart`: the rings have no link in common. Else they have either, or both, on which a message takes as long
// as it does, or less.
RingSeconds DrawSeconds(std::mt19937_64& random, bool apart) {
  const auto draw = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  const double most = std::pow(2.0, Draw(random, -2, 3));
  const int shares = apart ? 0 : Draw(random, 1, 3);  // a bit for each link
  const auto message = [&] {
    MessageSeconds seconds = {.total = draw(most), .shared = {}};
    const double flows = Draw(random, 1, 8);
    for (int link = 0; link < kSharedLinks; ++link) {
      if ((shares >> link & 1) == 0) continue;
      const double until = Draw(random, 0, 1) == 1 ? seconds.total : draw(seconds.total);
      const double start = draw(until);
      seconds.shared[link] = {.start = start, .moves = until - start, .flows = flows};
    }
    return seconds;
  };
  return {.block = draw(1), .q = message(), .kv = message(), .o = message(), .kv_outer = message()};
}

bool DrawApart(std::mt19937_64& random) { return Draw(random, 0, 2) == 0; }

TEST(MultiRingSchedule, RunsOnEveryMesh) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int at_once = 0;
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      const int kv_inner = DrawKvInner(random, tile);
      const Schedule schedule = MultiRingSchedule(tile, kv_inner, DrawSeconds(random, DrawApart(random)));
      ASSERT_TRUE(CheckSchedule(schedule).ok()) << "seed " << seed << ": " << CheckSchedule(schedule);
      ASSERT_EQ(LockstepMesh(tile, kv_inner).Run(schedule), "")
          << "seed " << seed << ": " << schedule.DebugString();
      at_once += std::any_of(schedule.steps.begin(), schedule.steps.end(),
                             [](const Step& step) { return step.spans > 1; });
    }
  }
  EXPECT_GT(at_once, 100);
}

// All blocks, what goes along a ring, and what goes over a link that several have, at least.
TEST(MultiRingSchedule, TakesNoLessThanItsParts) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 1000; ++i) {
    const Tile tile = {.a = Draw(random, 1, 12), .b = Draw(random, 1, 12)};
    const int kv_inner = DrawKvInner(random, tile);
    const RingSeconds seconds = DrawSeconds(random, DrawApart(random));
    const Schedule schedule = MultiRingSchedule(tile, kv_inner, seconds);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << schedule.DebugString());
    const int outer_hops = kv_inner == 0 ? 0 : tile.b / kv_inner - 1, inner_hops = tile.b - 1 - outer_hops;
    const double along_q = (tile.a - 1) * (seconds.q.total + seconds.o.total);
    const double along_kv = inner_hops * seconds.kv.total, along_outer = outer_hops * seconds.kv_outer.total;
    const double blocks = tile.ranks() * seconds.block;
    const double took = PlannedSecondsOf(schedule, seconds);
    ASSERT_GE(took, std::max({along_q, along_kv, along_outer, blocks}) * (1 - 1e-9));
    double moves = 0;  // a link that others use may double what a message takes on it
    for (int link = 0; link < kSharedLinks; ++link) {
      const double on_link = (tile.a - 1) * (seconds.q.shared[link].moves + seconds.o.shared[link].moves) +
                             inner_hops * seconds.kv.shared[link].moves +
                             outer_hops * seconds.kv_outer.shared[link].moves;
      ASSERT_GE(took, on_link * (1 - 1e-9));
      moves += on_link;
    }
    ASSERT_LE(took, (along_q + along_kv + along_outer + blocks + moves) * (1 + 1e-9));
  }
}

TEST(MultiRingSchedule, TakesAsLongAsInSmallStepsOfTime) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 60; ++i) {
    const Tile tile = {.a = Draw(random, 1, 4), .b = Draw(random, 1, 6)};
    const RingSeconds seconds = DrawSeconds(random, DrawApart(random));
    const Schedule schedule = MultiRingSchedule(tile, DrawKvInner(random, tile), seconds);
    const double took = PlannedSecondsOf(schedule, seconds);
    const double tick = took / 20000;
    // Each step and message ends at a tick.
    EXPECT_NEAR(SecondsOf(schedule, seconds, tick), took,
                4 * tick * static_cast<double>(schedule.steps.size()))
        << "seed " << seed << ": " << schedule.DebugString();
  }
}

OverlapCosts InBlocks(const RingSeconds& seconds) {
  const auto blocks = [&](const MessageSeconds& message) {
    return std::max(1, static_cast<int>(std::ceil(message.total / seconds.block)));
  };
  return {.c_q = blocks(seconds.q), .c_kv = blocks(seconds.kv), .c_o = blocks(seconds.o)};
}

// Against the best order of messages that go one after the other.
TEST(MultiRingSchedule, GainsWhereMessagesHaveLinksOfTheirOwn) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int draws = 0, faster = 0, slower = 0;
  for (int i = 0; i < 1000; ++i) {
    const Tile tile = {.a = Draw(random, 2, 8), .b = Draw(random, 2, 8)};
    const RingSeconds seconds = DrawSeconds(random, /*apart=*/true);
    const double one = PlannedSecondsOf(OptimalSchedule(tile, InBlocks(seconds)), seconds);
    const double two = PlannedSecondsOf(MultiRingSchedule(tile, 0, seconds), seconds);
    ++draws;
    faster += two < 0.99 * one;
    slower += two > 1.01 * one;
  }
  EXPECT_GT(faster, draws / 2);
  EXPECT_LT(slower, draws / 20);
}

TEST(MultiRingSchedule, HidesShortMessagesAlongOneRingBehindALongOneAlongTheOther) {
  const RingSeconds seconds = {.block = 1, .q = {.total = 1}, .kv = {.total = 4}, .o = {.total = 1}};
  const Schedule schedule = MultiRingSchedule({.a = 2, .b = 2}, 0, seconds);
  EXPECT_EQ(schedule.DebugString(),
            "2x2 | q spans 2: | kv spans 2: (0,0) | none: (1,0) | none: (1,1) | o: (0,1)");
}

// b = 4 in inner rings of 2: what comes from the next inner ring takes three blocks' time, and hides.
TEST(MultiRingSchedule, HidesTheOuterRingBehindTheInnerOne) {
  const RingSeconds seconds = {.block = 1, .q = {}, .kv = {.total = 1}, .o = {}, .kv_outer = {.total = 2}};
  const Schedule schedule = MultiRingSchedule({.a = 1, .b = 4}, 2, seconds);
  EXPECT_EQ(schedule.DebugString(),
            "1x4 in rings of 2 | kv spans 3: | kv: (0,0) | none: (0,1) | kv: (0,2) | none: (0,3)");
  EXPECT_DOUBLE_EQ(PlannedSecondsOf(schedule, seconds), 4);
}

TEST(MessagesUnderWay, ShareTheLinksThatBothHave) {
  constexpr MessageSeconds kAlone = {.total = 2, .shared = {}};
  constexpr MessageSeconds kOnPort = {.total = 2, .shared = {{{}, {.start = 0, .moves = 2}}}};
  MessagesUnderWay apart;
  apart.Leave(Ring::kQ, kOnPort, 0);
  apart.Leave(Ring::kKv, kAlone, 1);
  EXPECT_EQ(apart.ArrivalOf(Ring::kQ), 2);
  EXPECT_EQ(apart.ArrivalOf(Ring::kKv), 3);

  MessagesUnderWay together;
  together.Leave(Ring::kQ, kOnPort, 0);
  together.Leave(Ring::kKv, kOnPort, 1);  // half of Q is left, and all of KV
  EXPECT_DOUBLE_EQ(together.ArrivalOf(Ring::kQ), 3);
  EXPECT_DOUBLE_EQ(together.ArrivalOf(Ring::kKv), 4);
  together.Leave(Ring::kKvOuter, kOnPort, 3.5);  // a quarter of KV is left
  EXPECT_DOUBLE_EQ(together.ArrivalOf(Ring::kKv), 4.5);
  EXPECT_DOUBLE_EQ(together.ArrivalOf(Ring::kKvOuter), 6);
  EXPECT_DOUBLE_EQ(together.ArrivalOf(Ring::kQ), 3);
}

TEST(MessagesUnderWay, ShareByTheirFlows) {
  const auto on_port = [](double flows) {
    return MessageSeconds{.total = 3, .shared = {{{}, {.start = 0, .moves = 3, .flows = flows}}}};
  };
  MessagesUnderWay messages;
  messages.Leave(Ring::kQ, on_port(2), 0);
  messages.Leave(Ring::kKv, on_port(1), 0);
  EXPECT_DOUBLE_EQ(messages.ArrivalOf(Ring::kQ), 4.5);  // at two thirds
  EXPECT_DOUBLE_EQ(messages.ArrivalOf(Ring::kKv), 6);
}

// A flow that cannot fill its port leaves room.
TEST(MessagesUnderWay, TakeAsLongAsAloneWhereAPortHasRoomForBoth) {
  constexpr MessageSeconds kSlowFlow = {.total = 2, .shared = {{{}, {.start = 0, .moves = 1}}}};
  MessagesUnderWay messages;
  messages.Leave(Ring::kQ, kSlowFlow, 0);
  messages.Leave(Ring::kKv, kSlowFlow, 0);
  EXPECT_DOUBLE_EQ(messages.ArrivalOf(Ring::kQ), 2);
  EXPECT_DOUBLE_EQ(messages.ArrivalOf(Ring::kKv), 2);
}

TEST(MessagesUnderWay, WhatDoesNotTravelHasArrived) {
  MessagesUnderWay messages;
  messages.Leave(Ring::kQ, {.total = 2, .shared = {{{.start = 0, .moves = 2}}}}, 0);
  messages.Leave(Ring::kKv, {}, 1);
  EXPECT_EQ(messages.ArrivalOf(Ring::kKv), 1);
  EXPECT_EQ(messages.ArrivalOf(Ring::kQ), 2);
}

TEST(MultiRingSchedule, OfOneRankIsOneBlock) {
  EXPECT_EQ(MultiRingSchedule({.a = 1, .b = 1}, 0, {.block = 1}).DebugString(), "1x1 | none: (0,0)");
}

TEST(MultiRingSchedule, OfOneRingHasOneMessageAtATime) {
  const RingSeconds seconds = {.block = 1, .q = {.total = 0.5}, .kv = {.total = 2}, .o = {.total = 0.5}};
  EXPECT_EQ(MultiRingSchedule({.a = 1, .b = 3}, 0, seconds).DebugString(),
            "1x3 | kv: (0,0) | kv: (0,1) | none: (0,2)");
}

}  // namespace
}  // namespace meshfill
