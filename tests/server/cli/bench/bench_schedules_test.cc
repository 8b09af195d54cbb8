// The benchmark of schedules.
#include "server/cli/bench/bench_schedules.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <sstream>
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
  const std::vector<std::string> words = {"schedules", "--side", "4", "--max-cost", "2"};
  const json said = PrintJson(AddBenchSchedulesCommand, words);
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

  const std::string text = Print(AddBenchSchedulesCommand, words);
  EXPECT_THAT(text, MatchesRegex("128 cases: tiles up to 4x4, costs 1 to 2\n"
                                 " +min +mean +p50 +p95 +p99 +max +> 1.02\n"
                                 "time, Algorithm 2 / exact( +[0-9.]+){6} +[0-9.]+ %\n"
                                 "time, least / exact( +1.0000){6} +0.00 %\n"
                                 "peak, least / Algorithm 2( +[0-9.]+){6} +[0-9.]+ %\n"
                                 "[0-9.]+ ms for the search, [0-9.]+ ms for Algorithm 2, [0-9.]+ ms for the "
                                 "least time\n"
                                 " 256 ranks,  9 shapes: .*, of windows of 4096 +[0-9.]+ ms\n"
                                 "3600 ranks, 45 shapes: .*\n4096 ranks, 13 shapes: .*\n"));
  for (const auto& [row, figure] : {std::pair("time, Algorithm 2 / exact", "greedy_time"),
                                    std::pair("peak, least / Algorithm 2", "optimal_peak")}) {
    std::istringstream figures(text.substr(text.find(row) + std::string(row).size()));
    double printed = 0;
    for (const char* name : {"min", "mean", "p50", "p95", "p99", "max"}) {
      figures >> printed;
      EXPECT_NEAR(printed, said[figure][name].get<double>(), 0.00006) << row << ", " << name;
    }
    figures >> printed;
    EXPECT_NEAR(printed, said[figure]["above_1_02"].get<double>() * 100, 0.006) << row;
  }
}

}  // namespace
}  // namespace meshfill
