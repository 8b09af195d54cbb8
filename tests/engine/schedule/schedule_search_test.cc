#include "engine/schedule/schedule_search.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "engine/schedule/schedule_cost.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/lockstep_mesh.h"

namespace meshfill {
namespace {

// The least time over every schedule that schedule.h's rules allow: any communication and any set of ready
// blocks in each step.
class EverySchedule {
 public:
  EverySchedule(Tile tile, OverlapCosts costs) : tile_(tile), costs_(costs) {}

  int64_t LeastTime() { return LeastFrom({}); }

 private:
  struct State {
    unsigned computed = 0;  // bit u·b + v
    int q = 0;              // Recv Q that have ended
    int kv = 0;
    int o = 0;
    auto operator<=>(const State&) const = default;
  };

  unsigned Bit(int u, int v) const { return 1u << (u * tile_.b + v); }

  int64_t LeastFrom(State state) {
    if (state.computed == Bit(tile_.a, 0) - 1 && state.o == tile_.a - 1) return 0;
    if (const auto known = least_.find(state); known != least_.end()) return known->second;
    unsigned ready = 0;
    for (int u = 0; u <= state.q; ++u) {
      for (int v = 0; v <= state.kv; ++v) ready |= Bit(u, v) & ~state.computed;
    }
    int64_t least = INT64_MAX;
    for (std::optional<Traffic> comm : {std::optional<Traffic>(), std::optional(Traffic::kQ),
                                        std::optional(Traffic::kKv), std::optional(Traffic::kO)}) {
      if (!MayStart(state, comm)) continue;
      for (unsigned blocks = ready;; blocks = (blocks - 1) & ready) {
        if (comm != std::nullopt || blocks != 0) {
          const int64_t time = std::max(CommBlocks(comm, costs_), __builtin_popcount(blocks));
          least = std::min(least, Plus(time, LeastFrom({.computed = state.computed | blocks,
                                                        .q = state.q + (comm == Traffic::kQ),
                                                        .kv = state.kv + (comm == Traffic::kKv),
                                                        .o = state.o + (comm == Traffic::kO)})));
        }
        if (blocks == 0) break;
      }
    }
    return least_[state] = least;
  }

  bool MayStart(const State& state, std::optional<Traffic> comm) const {
    if (!comm.has_value()) return true;
    if (comm == Traffic::kQ) return state.q < tile_.a - 1;
    if (comm == Traffic::kKv) return state.kv < tile_.b - 1;
    if (state.o == tile_.a - 1) return false;
    const unsigned row = Bit(state.o + 2, 0) - Bit(state.o + 1, 0);
    return (state.computed & row) == row;
  }

  static int64_t Plus(int64_t time, int64_t rest) { return rest == INT64_MAX ? rest : time + rest; }

  const Tile tile_;
  const OverlapCosts costs_;
  std::map<State, int64_t> least_;
};

OverlapCosts DrawCosts(std::mt19937_64& random, int limit) {
  limit = Draw(random, 1, limit);
  return {.c_q = Draw(random, 1, limit), .c_kv = Draw(random, 1, limit), .c_o = Draw(random, 1, limit)};
}

std::string Named(uint64_t seed, Tile tile, OverlapCosts costs) {
  return "seed " + std::to_string(seed) + ", tile " + tile.DebugString() + ", costs " +
         std::to_string(costs.c_q) + " " + std::to_string(costs.c_kv) + " " + std::to_string(costs.c_o);
}

TEST(SearchSchedule, NoScheduleOfASmallTileTakesLess) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int a = 1; a <= 8; ++a) {
    for (int b = 1; a * b <= 9; ++b) {
      for (int i = 0; i < 6; ++i) {
        const OverlapCosts costs = DrawCosts(random, 6);
        const Schedule schedule = SearchSchedule({.a = a, .b = b}, costs);
        ASSERT_TRUE(CheckSchedule(schedule).ok()) << CheckSchedule(schedule);
        ASSERT_EQ(TimeInBlocks(schedule, costs), EverySchedule({.a = a, .b = b}, costs).LeastTime())
            << Named(seed, {.a = a, .b = b}, costs);
      }
    }
  }
}

TEST(SearchSchedule, NeverBeatsItsBoundNorLosesToGreedy) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 400; ++i) {
    const Tile tile = {.a = Draw(random, 1, 6), .b = Draw(random, 1, 6)};
    const OverlapCosts costs = DrawCosts(random, 8);
    const Schedule schedule = SearchSchedule(tile, costs);
    ASSERT_TRUE(CheckSchedule(schedule).ok()) << Named(seed, tile, costs) << ": " << CheckSchedule(schedule);
    ASSERT_EQ(LockstepMesh(tile).Run(schedule), "") << Named(seed, tile, costs);
    ASSERT_GE(TimeInBlocks(schedule, costs), LeastTimeBound(tile, costs)) << Named(seed, tile, costs);
    ASSERT_LE(TimeInBlocks(schedule, costs), TimeInBlocks(GreedySchedule(tile, costs), costs))
        << Named(seed, tile, costs);
  }
}

// On 2×2 Algorithm 2 takes Recv KV where they tie, and then has a row to compute before it may send.
TEST(SearchSchedule, HidesWhatGreedyExposes) {
  EXPECT_EQ(TimeInBlocks(GreedySchedule({.a = 2, .b = 2}, {}), {}), 5);
  const Schedule schedule = SearchSchedule({.a = 2, .b = 2}, {});
  EXPECT_EQ(TimeInBlocks(schedule, {}), 4);
  EXPECT_EQ(schedule.DebugString(), "2x2 | q: (0,0) | kv: (1,0) | none: (1,1) | o: (0,1)");
}

}  // namespace
}  // namespace meshfill
