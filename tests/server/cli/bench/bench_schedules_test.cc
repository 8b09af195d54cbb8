// The benchmark of schedules.
#include "server/cli/bench/bench_schedules.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "engine/schedule/optimal_schedule.h"
#include "engine/schedule/schedule.h"
#include "engine/schedule/schedule_cost.h"
#include "tests/server/cli/bench/benches.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::MatchesRegex;

// The figures again, from their definitions.
TEST_F(Benches, SchedulesAreDistributedAsTheyAre) {
  constexpr int kSide = 4, kMaxCost = 2;
  std::vector<double> ratios;
  for (int a = 1; a <= kSide; ++a) {
    for (int b = 1; b <= kSide; ++b) {
      for (int costs = 0; costs < kMaxCost * kMaxCost * kMaxCost; ++costs) {
        const OverlapCosts cost = {.c_q = 1 + costs % 2, .c_kv = 1 + costs / 2 % 2, .c_o = 1 + costs / 4};
        ratios.push_back(static_cast<double>(TimeInBlocks(GreedySchedule({a, b}, cost), cost)) /
                         static_cast<double>(TimeInBlocks(OptimalSchedule({a, b}, cost), cost)));
      }
    }
  }
  std::sort(ratios.begin(), ratios.end());
  const double count = static_cast<double>(ratios.size());
  double mean = 0, above = 0;
  for (const double ratio : ratios) {
    mean += ratio / count;
    above += ratio > 1.02 ? 1 / count : 0;
  }
  const json said = PrintJson(AddBenchSchedulesCommand, {"schedules", "--side", "4", "--max-cost", "2"});
  EXPECT_EQ(said["side"], 4);
  EXPECT_EQ(said["max_cost"], 2);
  EXPECT_EQ(said["cases"], ratios.size());
  EXPECT_EQ(said["greedy_time"]["min"], ratios.front());
  EXPECT_EQ(said["greedy_time"]["max"], ratios.back());
  EXPECT_NEAR(said["greedy_time"]["mean"], mean, 1e-12);
  EXPECT_NEAR(said["greedy_time"]["above_1_02"], above, 1e-12);
  for (const auto& [name, share] : {std::pair("p50", 0.5), std::pair("p95", 0.95), std::pair("p99", 0.99)}) {
    EXPECT_EQ(said["greedy_time"][name], ratios[static_cast<size_t>(std::ceil(share * count)) - 1]) << name;
  }
  EXPECT_EQ(said["optimal_time"]["min"], 1);
  EXPECT_EQ(said["optimal_time"]["max"], 1);
  EXPECT_GT(said["optimal_peak"]["min"], 0);
  const std::vector<std::pair<int, int>> shapes = {{256, 9}, {3600, 45}, {4096, 13}};
  ASSERT_EQ(said["pools"].size(), shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    EXPECT_EQ(said["pools"][i]["ranks"], shapes[i].first);
    EXPECT_EQ(said["pools"][i]["shapes"], shapes[i].second);
    EXPECT_GT(said["pools"][i]["plan_seconds"], 0);
    EXPECT_GT(said["pools"][i]["windows_plan_seconds"], 0);
  }
}

}  // namespace
}  // namespace meshfill
