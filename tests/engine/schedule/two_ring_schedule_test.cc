#include "engine/schedule/two_ring_schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "engine/schedule/optimal_schedule.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/lockstep_mesh.h"

namespace meshfill {
namespace {

// A rank's time, from the start of each message and the end of each step. Written from schedule.h.
double SecondsOf(const Schedule& schedule, const RingSeconds& seconds) {
  double now = 0;
  std::array<double, kSharedLinks> free{};  // the links that both rings have
  std::multimap<size_t, double> arrivals;   // by the step that they end
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    if (step.comm.has_value()) {
      const MessageSeconds message = step.comm == Traffic::kQ    ? seconds.q
                                     : step.comm == Traffic::kKv ? seconds.kv
                                                                 : seconds.o;
      double arrives = now + message.total;
      for (int link = 0; link < kSharedLinks; ++link) {
        const auto& [start, moves] = message.shared[link];
        if (moves == 0) continue;
        free[link] = std::max(now + start, free[link]) + moves;
        arrives = std::max(arrives, free[link]);
      }
      arrivals.emplace(i + step.spans - 1, arrives);
    }
    now += static_cast<double>(step.blocks.size()) * seconds.block;
    const auto [first, last] = arrivals.equal_range(i);
    for (auto each = first; each != last; ++each) now = std::max(now, each->second);
  }
  return now;
}

// `apart`: the rings have no link in common. Else they have either, or both, on which a message takes as long
// as it does, or less.
RingSeconds DrawSeconds(std::mt19937_64& random, bool apart) {
  const auto draw = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  const double most = std::pow(2.0, Draw(random, -2, 3));
  const int shares = apart ? 0 : Draw(random, 1, 3);  // a bit for each link
  const auto message = [&] {
    MessageSeconds seconds = {.total = draw(most), .shared = {}};
    for (int link = 0; link < kSharedLinks; ++link) {
      if ((shares >> link & 1) == 0) continue;
      const double until = Draw(random, 0, 1) == 1 ? seconds.total : draw(seconds.total);
      const double start = draw(until);
      seconds.shared[link] = {.start = start, .moves = until - start};
    }
    return seconds;
  };
  return {.block = draw(1), .q = message(), .kv = message(), .o = message()};
}

bool DrawApart(std::mt19937_64& random) { return Draw(random, 0, 2) == 0; }

TEST(TwoRingSchedule, RunsOnEveryMesh) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int at_once = 0;
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      const Schedule schedule = TwoRingSchedule(tile, DrawSeconds(random, DrawApart(random)));
      ASSERT_TRUE(CheckSchedule(schedule).ok()) << "seed " << seed << ": " << CheckSchedule(schedule);
      ASSERT_EQ(LockstepMesh(tile).Run(schedule), "") << "seed " << seed << ": " << schedule.DebugString();
      at_once += std::any_of(schedule.steps.begin(), schedule.steps.end(),
                             [](const Step& step) { return step.spans > 1; });
    }
  }
  EXPECT_GT(at_once, 100);
}

// All blocks, what goes along a ring, and what goes over the link that both have, at least.
TEST(TwoRingSchedule, TakesNoLessThanItsParts) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 1000; ++i) {
    const Tile tile = {.a = Draw(random, 1, 12), .b = Draw(random, 1, 12)};
    const RingSeconds seconds = DrawSeconds(random, DrawApart(random));
    const Schedule schedule = TwoRingSchedule(tile, seconds);
    const double along_q = (tile.a - 1) * (seconds.q.total + seconds.o.total);
    const double along_kv = (tile.b - 1) * seconds.kv.total;
    const double blocks = tile.ranks() * seconds.block;
    const double took = SecondsOf(schedule, seconds);
    const double least = std::max({along_q, along_kv, blocks}) * (1 - 1e-9);
    ASSERT_GE(took, least) << "seed " << seed << ": " << schedule.DebugString();
    ASSERT_LE(took, (along_q + along_kv + blocks) * (1 + 1e-9))
        << "seed " << seed << ": " << schedule.DebugString();
    for (int link = 0; link < kSharedLinks; ++link) {
      const double moves = (tile.a - 1) * (seconds.q.shared[link].moves + seconds.o.shared[link].moves) +
                           (tile.b - 1) * seconds.kv.shared[link].moves;
      ASSERT_GE(took, moves * (1 - 1e-9)) << "seed " << seed;
    }
  }
}

OverlapCosts InBlocks(const RingSeconds& seconds) {
  const auto blocks = [&](const MessageSeconds& message) {
    return std::max(1, static_cast<int>(std::ceil(message.total / seconds.block)));
  };
  return {.c_q = blocks(seconds.q), .c_kv = blocks(seconds.kv), .c_o = blocks(seconds.o)};
}

// Against the best order of messages that go one after the other.
TEST(TwoRingSchedule, GainsWhereMessagesHaveLinksOfTheirOwn) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int draws = 0, faster = 0, slower = 0;
  for (int i = 0; i < 1000; ++i) {
    const Tile tile = {.a = Draw(random, 2, 8), .b = Draw(random, 2, 8)};
    const RingSeconds seconds = DrawSeconds(random, /*apart=*/true);
    const double one = SecondsOf(OptimalSchedule(tile, InBlocks(seconds)), seconds);
    const double two = SecondsOf(TwoRingSchedule(tile, seconds), seconds);
    ++draws;
    faster += two < 0.99 * one;
    slower += two > 1.01 * one;
  }
  EXPECT_GT(faster, draws / 2);
  EXPECT_LT(slower, draws / 20);
}

TEST(TwoRingSchedule, HidesShortMessagesAlongOneRingBehindALongOneAlongTheOther) {
  const RingSeconds seconds = {.block = 1, .q = {.total = 1}, .kv = {.total = 4}, .o = {.total = 1}};
  const Schedule schedule = TwoRingSchedule({.a = 2, .b = 2}, seconds);
  EXPECT_EQ(schedule.DebugString(),
            "2x2 | q spans 2: | kv spans 2: (0,0) | none: (1,0) | none: (1,1) | o: (0,1)");
}

TEST(MessageSeconds, AMessageComesBehindTheOtherRingsOnTheLinksThatBothHave) {
  const MessageUnderWay other = {.arrives = 6, .left = {5, 0}};
  EXPECT_EQ(Leave({.total = 2, .shared = {{{.start = 0.5, .moves = 1}}}}, 1, other).arrives, 6);
  EXPECT_EQ(Leave({.total = 2, .shared = {{{}, {.start = 0.5, .moves = 1}}}}, 1, other).arrives, 3);
  EXPECT_EQ(Leave({}, 1, other).arrives, 1);  // no message
}

TEST(TwoRingSchedule, OfOneRankIsOneBlock) {
  EXPECT_EQ(TwoRingSchedule({.a = 1, .b = 1}, {.block = 1}).DebugString(), "1x1 | none: (0,0)");
}

TEST(TwoRingSchedule, OfOneRingHasOneMessageAtATime) {
  const RingSeconds seconds = {.block = 1, .q = {.total = 0.5}, .kv = {.total = 2}, .o = {.total = 0.5}};
  EXPECT_EQ(TwoRingSchedule({.a = 1, .b = 3}, seconds).DebugString(),
            "1x3 | kv: (0,0) | kv: (0,1) | none: (0,2)");
}

}  // namespace
}  // namespace meshfill
