#include "engine/schedule/two_ring_schedule.h"

#include <algorithm>
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
  double now = 0, shared_free = 0;         // the link that both rings have
  std::multimap<size_t, double> arrivals;  // by the step that they end
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    if (step.comm.has_value()) {
      const MessageSeconds message = step.comm == Traffic::kQ    ? seconds.q
                                     : step.comm == Traffic::kKv ? seconds.kv
                                                                 : seconds.o;
      if (message.shared > 0) {
        shared_free = std::max(now + message.start, shared_free) + (message.shared - message.start);
      }
      const double on_its_own = now + message.total;
      arrivals.emplace(i + step.spans - 1,
                       message.shared > 0 ? std::max(on_its_own, shared_free) : on_its_own);
    }
    now += static_cast<double>(step.blocks.size()) * seconds.block;
    const auto [first, last] = arrivals.equal_range(i);
    for (auto each = first; each != last; ++each) now = std::max(now, each->second);
  }
  return now;
}

// What the rings have in common: the link on which each is slowest, one on which KV takes less, nothing.
enum class Share { kSlowest, kOther, kNothing };

RingSeconds DrawSeconds(std::mt19937_64& random, Share share) {
  const auto draw = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  const double most = std::pow(2.0, Draw(random, -2, 3));
  const auto message = [&](bool slowest_is_shared) {
    MessageSeconds seconds = {.total = draw(most)};
    if (share == Share::kNothing) return seconds;
    seconds.shared = slowest_is_shared ? seconds.total : draw(seconds.total);
    seconds.start = draw(seconds.shared);
    return seconds;
  };
  return {.block = draw(1), .q = message(true), .kv = message(share != Share::kOther), .o = message(true)};
}

Share DrawShare(std::mt19937_64& random) { return static_cast<Share>(Draw(random, 0, 2)); }

TEST(TwoRingSchedule, RunsOnEveryMesh) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int at_once = 0;
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      const Schedule schedule = TwoRingSchedule(tile, DrawSeconds(random, DrawShare(random)));
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
    const RingSeconds seconds = DrawSeconds(random, DrawShare(random));
    const Schedule schedule = TwoRingSchedule(tile, seconds);
    const double along_q = (tile.a - 1) * (seconds.q.total + seconds.o.total);
    const double along_kv = (tile.b - 1) * seconds.kv.total;
    const double blocks = tile.ranks() * seconds.block;
    const double took = SecondsOf(schedule, seconds);
    const double least = std::max({along_q, along_kv, blocks}) * (1 - 1e-9);
    ASSERT_GE(took, least) << "seed " << seed << ": " << schedule.DebugString();
    ASSERT_LE(took, (along_q + along_kv + blocks) * (1 + 1e-9))
        << "seed " << seed << ": " << schedule.DebugString();
    const auto moves = [](const MessageSeconds& message) { return message.shared - message.start; };
    const double shared =
        (tile.a - 1) * (moves(seconds.q) + moves(seconds.o)) + (tile.b - 1) * moves(seconds.kv);
    ASSERT_GE(took, shared * (1 - 1e-9)) << "seed " << seed;
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
    const RingSeconds seconds = DrawSeconds(random, Share::kNothing);
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
  const RingSeconds seconds = {.block = 1, .q = {1}, .kv = {4}, .o = {1}};
  const Schedule schedule = TwoRingSchedule({.a = 2, .b = 2}, seconds);
  EXPECT_EQ(schedule.DebugString(),
            "2x2 | q spans 2: | kv spans 2: (0,0) | none: (1,0) | none: (1,1) | o: (0,1)");
}

TEST(TwoRingSchedule, OfOneRankIsOneBlock) {
  EXPECT_EQ(TwoRingSchedule({.a = 1, .b = 1}, {.block = 1}).DebugString(), "1x1 | none: (0,0)");
}

TEST(TwoRingSchedule, OfOneRingHasOneMessageAtATime) {
  const RingSeconds seconds = {.block = 1, .q = {0.5}, .kv = {2}, .o = {0.5}};
  EXPECT_EQ(TwoRingSchedule({.a = 1, .b = 3}, seconds).DebugString(),
            "1x3 | kv: (0,0) | kv: (0,1) | none: (0,2)");
}

}  // namespace
}  // namespace meshfill
