// Many stories of a pool that fails and heals (pool_simulation.h). MESHFILL_SEED=n replays one of them and
// tells it; MESHFILL_SEEDS=n tries so many; MESHFILL_FIRST_SEED=n starts there instead of at a random one.
#include "tests/server/pool/simulation/pool_simulation.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace meshfill {
namespace {

constexpr uint64_t kSeeds = 2000;

uint64_t Environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

TEST(PoolSimulationTest, EveryRequestHasOneRightAnswerWhateverFails) {
  if (std::getenv("MESHFILL_SEED") != nullptr) {
    PoolSimulation story(Environment("MESHFILL_SEED", 0), /*verbose=*/true);
    EXPECT_EQ(story.Run(), "");
    return;
  }
  const uint64_t seeds = Environment("MESHFILL_SEEDS", kSeeds);
  const uint64_t first = Environment("MESHFILL_FIRST_SEED", std::random_device{}());
  std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + seeds - 1));
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  int failures = 0;
  PoolSimulation::Census total;
  const auto tell = [&] {
    for (uint64_t i = next++; i < seeds; i = next++) {
      PoolSimulation story(first + i);
      const std::string failure = story.Run();
      const std::lock_guard<std::mutex> lock(mutex);
      total.Add(story.census());
      if (failure.empty()) continue;
      if (++failures <= 5) {
        ADD_FAILURE() << "seed " << first + i << ": " << failure
                      << " (replay with MESHFILL_SEED=" << first + i << ")";
      }
      if (failures > 50) return;
    }
  };
  std::thread other(tell);
  tell();
  other.join();
  total.Print();
  // The stories have in them what they are for.
  if (failures > 0) return;
  const int share = static_cast<int>(seeds / 20);
  EXPECT_GT(total.results, 20 * share);
  EXPECT_GT(total.retries, share);
  EXPECT_GT(total.losses, share);
  EXPECT_GT(total.cancelled, share);
  EXPECT_GT(total.poisoned, share / 2);
  EXPECT_GT(total.leases, 100 * share);
  EXPECT_GT(total.reads, 10 * share);
  EXPECT_GT(total.lost_reads, share / 4);
  EXPECT_GT(total.refused, share / 4);
  EXPECT_GT(total.renewals, share);
  EXPECT_GT(total.releases, share);
  EXPECT_GT(total.lapses, share);
  EXPECT_GT(total.behind_a_prefix, share);
  EXPECT_GT(total.evictions, share / 4);
  EXPECT_GT(total.in_pieces, share);
  EXPECT_GT(total.pieces_again, 0);
  EXPECT_GT(total.pieces_lost, share / 20);
  EXPECT_GT(total.streamed, share);
  EXPECT_GT(total.shared, share);
  EXPECT_GT(total.on_submeshes, 10 * share);
  EXPECT_GT(total.side_by_side, share);
  EXPECT_GE(total.most_at_once, 3);
  EXPECT_GT(total.pauses, 10 * share);
  EXPECT_GT(total.agreements, share);
  EXPECT_GT(total.crowded_out, share);
  EXPECT_GT(total.attempts_of_innocents, share / 4);
  EXPECT_GT(total.packs, share);
  EXPECT_GT(total.in_packs, 2 * total.packs);
  EXPECT_GT(total.packs_refused, share / 4);
  EXPECT_GT(total.left_in_packs, share / 20);
  EXPECT_GT(total.packs_again, share / 4);
  EXPECT_GT(total.entered, 40 * share);
  EXPECT_GT(total.entered_again, 5 * share);
  EXPECT_GT(total.places_lost, share / 2);
  EXPECT_GT(total.slow_places_lost, share / 2);
  EXPECT_GT(total.put_back, 3 * share);
  EXPECT_GT(total.preempted, 40 * share);
  EXPECT_GT(total.packs_by_turn, share / 10);
  EXPECT_GT(total.submeshes_by_turn, share);
  EXPECT_GT(total.aged, 5 * share);
  EXPECT_GT(total.elders_gave_way, 20 * share);
}

TEST(PoolSimulationTest, ASeedReplays) {
  for (uint64_t seed = 42; seed < 50; ++seed) {
    PoolSimulation one(seed), again(seed);
    EXPECT_EQ(one.Run(), again.Run());
    EXPECT_EQ(one.census().answers, again.census().answers);
    EXPECT_EQ(one.census().losses, again.census().losses);
    EXPECT_EQ(one.census().refused_by_queue, again.census().refused_by_queue);
    EXPECT_EQ(one.census().preempted, again.census().preempted);
  }
}

}  // namespace
}  // namespace meshfill
