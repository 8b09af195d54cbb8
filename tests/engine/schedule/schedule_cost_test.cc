#include "engine/schedule/schedule_cost.h"

#include <algorithm>
#include <vector>

#include "engine/schedule/optimal_schedule.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

// The peak from the life of each chunk, as a first and a last moment. A step's moments are its start, its
// blocks and its end.
class PlainPeak {
 public:
  PlainPeak(const Schedule& schedule, OverlapCosts costs) : tile_(schedule.tile), costs_(costs) {
    Number(schedule);
    for (int u = 0; u < tile_.a; ++u) {
      int last = *std::max_element(block_[u].begin(), block_[u].end());
      if (u < tile_.a - 1) last = std::max(last, q_[u].end);
      AddLife(u == 0 ? 0 : q_[u - 1].start, last, costs.c_q);
    }
    for (int v = 0; v < tile_.b; ++v) {
      int last = v < tile_.b - 1 ? kv_[v].end : 0;
      for (int u = 0; u < tile_.a; ++u) last = std::max(last, block_[u][v]);
      AddLife(v == 0 ? 0 : kv_[v - 1].start, last, costs.c_kv);
    }
    for (int u = 0; u < tile_.a; ++u) AddRow(u);
  }

  int64_t Run() const { return *std::max_element(live_.begin(), live_.end()); }

 private:
  struct Transfer {
    int start = 0;
    int end = 0;
  };

  void Number(const Schedule& schedule) {
    block_.assign(tile_.a, std::vector<int>(tile_.b, 0));
    int moment = 0;
    for (const Step& step : schedule.steps) {
      Transfer transfer = {.start = moment++};
      for (const BlockIndex& block : step.blocks) block_[block.u][block.v] = moment++;
      transfer.end = moment++;
      if (step.comm == Traffic::kQ) q_.push_back(transfer);
      if (step.comm == Traffic::kKv) kv_.push_back(transfer);
      if (step.comm == Traffic::kO) o_.push_back(transfer);
    }
    live_.assign(moment, 0);
  }

  void AddRow(int u) {
    const int sent = u == 0 ? static_cast<int>(live_.size()) - 1 : o_[u - 1].end;
    const int begun = *std::min_element(block_[u].begin(), block_[u].end());
    const int arrival =
        tile_.a == 1 || u == 1 ? -1 : (u == 0 ? tile_.a - 2 : u - 2);  // of the Send O that brings it
    if (arrival < 0) {
      AddLife(begun, sent, costs_.c_o);
    } else if (begun > o_[arrival].end) {
      AddLife(o_[arrival].start, sent, costs_.c_o);
    } else {
      AddLife(begun, sent, costs_.c_o);
      AddLife(o_[arrival].start, o_[arrival].end, costs_.c_o);
    }
  }

  void AddLife(int first, int last, int cost) {
    for (int moment = first; moment <= last; ++moment) live_[moment] += cost;
  }

  const Tile tile_;
  const OverlapCosts costs_;
  std::vector<std::vector<int>> block_;  // [a][b]: moments
  std::vector<Transfer> q_;              // in turn
  std::vector<Transfer> kv_;
  std::vector<Transfer> o_;
  std::vector<int64_t> live_;  // by moment
};

TEST(TimeInBlocks, IsTheLongerOfEachStep) {
  const OverlapCosts costs = {.c_q = 1, .c_kv = 2, .c_o = 1};
  // q 1, kv 2, q 1, kv 2, none 1, o 1, o 1, none 1
  EXPECT_EQ(TimeInBlocks(GreedySchedule({.a = 3, .b = 3}, costs), costs), 10);
  EXPECT_EQ(
      TimeInBlocks({.tile = {}, .steps = {{.comm = Traffic::kQ, .blocks = {{0, 0}, {0, 1}, {0, 2}}}}}, costs),
      3);
}

TEST(PeakChunkCost, OfARingIsTwoKvOneQOneO) {
  EXPECT_EQ(PeakChunkCost(GreedySchedule({.a = 1, .b = 5}, {}), {.c_q = 1, .c_kv = 10, .c_o = 100}), 121);
}

TEST(PeakChunkCost, SumsTheLivesOfAllChunks) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const Tile tile = {.a = Draw(random, 1, 8), .b = Draw(random, 1, 8)};
    const OverlapCosts costs = {
        .c_q = Draw(random, 1, 9), .c_kv = Draw(random, 1, 9), .c_o = Draw(random, 1, 9)};
    for (const Schedule& schedule : {GreedySchedule(tile, costs), OptimalSchedule(tile, costs)}) {
      ASSERT_EQ(PeakChunkCost(schedule, costs), PlainPeak(schedule, costs).Run())
          << "seed " << seed << ", costs " << costs.c_q << " " << costs.c_kv << " " << costs.c_o << "\n"
          << schedule.DebugString();
    }
  }
}

}  // namespace
}  // namespace meshfill
