#include "server/cli/bench/bench_schedules.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/plan/planner.h"
#include "engine/schedule/optimal_schedule.h"
#include "engine/schedule/schedule_cost.h"
#include "engine/schedule/schedule_search.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

using Scheduler = Schedule (*)(Tile, OverlapCosts);

// How one figure is distributed over all cases.
struct Distribution {
  double min = 0;
  double mean = 0;
  double p50 = 0;
  double p95 = 0;
  double p99 = 0;
  double max = 0;
  double above_1_02 = 0;  // share of the cases
};

Distribution DistributionOf(std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  const auto count = static_cast<double>(ratios.size());
  const auto at = [&](double share) {
    return ratios[static_cast<size_t>(std::ceil(share * count)) - 1];  // nearest rank
  };
  Distribution result = {
      .min = ratios.front(), .p50 = at(0.50), .p95 = at(0.95), .p99 = at(0.99), .max = ratios.back()};
  for (double ratio : ratios) {
    result.mean += ratio;
    result.above_1_02 += ratio > 1.02 ? 1 : 0;
  }
  result.mean /= count;
  result.above_1_02 /= count;
  return result;
}

// A scheduler, timed over all its calls.
class Timed {
 public:
  explicit Timed(Scheduler scheduler) : scheduler_(scheduler) {}

  Schedule operator()(Tile tile, OverlapCosts costs) {
    const auto start = std::chrono::steady_clock::now();
    Schedule schedule = scheduler_(tile, costs);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return schedule;
  }
  double seconds() const { return seconds_; }

 private:
  const Scheduler scheduler_;
  double seconds_ = 0;
};

// Every tile up to side × side with every cost up to max_cost.
struct Comparison {
  std::vector<double> greedy_time;   // Algorithm 2 / exact
  std::vector<double> optimal_time;  // least time / exact
  std::vector<double> optimal_peak;  // least time / Algorithm 2, of PeakChunkCost
  Timed greedy{GreedySchedule};
  Timed optimal{OptimalSchedule};
  Timed search{SearchSchedule};

  absl::Status AddCase(Tile tile, OverlapCosts costs) {
    const Schedule exact = search(tile, costs);
    const Schedule by_algorithm_2 = greedy(tile, costs);
    const Schedule least = optimal(tile, costs);
    for (const Schedule* schedule : {&exact, &by_algorithm_2, &least}) {
      RETURN_IF_ERROR(CheckSchedule(*schedule));
    }
    const auto exact_time = static_cast<double>(TimeInBlocks(exact, costs));
    greedy_time.push_back(static_cast<double>(TimeInBlocks(by_algorithm_2, costs)) / exact_time);
    optimal_time.push_back(static_cast<double>(TimeInBlocks(least, costs)) / exact_time);
    optimal_peak.push_back(static_cast<double>(PeakChunkCost(least, costs)) /
                           static_cast<double>(PeakChunkCost(by_algorithm_2, costs)));
    return absl::OkStatus();
  }
};

// How long all shapes of a pool take to schedule, and to plan.
struct PoolTiming {
  int ranks = 0;
  int shapes = 0;
  double greedy_seconds = 0;
  double optimal_seconds = 0;
  double plan_seconds = 0;
  double windows_plan_seconds = 0;  // planning of the model with a window of kWindow in all layers
};

constexpr int64_t kWindow = 4096;

// A million tokens of an 8-billion-parameter Llama on ranks of 400 TFLOP/s, eight in a node, with every
// choice left to the planner. `window`: of all layers, 0: none.
double PlanSeconds(int ranks, int64_t window) {
  const ModelShape model = {.layers = 32,
                            .hidden = 4096,
                            .intermediate = 14336,
                            .q_heads = 32,
                            .kv_heads = 8,
                            .head_dim = 128,
                            .vocab = 128256,
                            .kinds = LayerKindsOf(std::vector<LayerForm>(32, {.window = window})),
                            .dtype = DType::kBf16};
  const PoolSpeed speed = {.gemm_flops_per_second = 400e12, .attention_flops_per_second = 400e12};
  PlanRequest request = {
      .tokens = 1 << 20, .ranks = ranks, .one_memory = false, .hides_exchanges = true, .many_rings = true};
  request.layout = std::nullopt;
  request.partial_dtype = std::nullopt;
  request.topology = {.same_node = {.latency_seconds = 5e-6, .bytes_per_second = 300e9},
                      .between_nodes = {.latency_seconds = 2e-5, .bytes_per_second = 20e9},
                      .node_bytes_per_second = 50e9};
  for (int seat = 0; seat < ranks; ++seat) request.topology.node_of_seat.push_back(seat / 8);
  const auto start = std::chrono::steady_clock::now();
  const bool planned = MakePlan(model, speed, request).ok();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return planned ? seconds : std::nan("");
}

PoolTiming TimePool(int ranks, OverlapCosts costs) {
  Timed greedy(GreedySchedule);
  Timed optimal(OptimalSchedule);
  const std::vector<Tile> tiles = TilesOf(ranks);
  for (Tile tile : tiles) {
    greedy(tile, costs);
    optimal(tile, costs);
  }
  return {.ranks = ranks,
          .shapes = static_cast<int>(tiles.size()),
          .greedy_seconds = greedy.seconds(),
          .optimal_seconds = optimal.seconds(),
          .plan_seconds = PlanSeconds(ranks, 0),
          .windows_plan_seconds = PlanSeconds(ranks, kWindow)};
}

class BenchSchedulesCommand : public Command {
 public:
  explicit BenchSchedulesCommand(CLI::App& parent)
      : Command(parent.add_subcommand("schedules",
                                      "Algorithm 2 and the least-time schedule against an exact search")) {
    app_->add_option("--side", side_, "Tiles up to N×N")
        ->type_name("N")
        ->check(CLI::Range(1, 8))
        ->capture_default_str();
    app_->add_option("--max-cost", max_cost_, "Costs of Q, KV and O from 1 to N blocks")
        ->type_name("N")
        ->check(CLI::Range(1, 32))
        ->capture_default_str();
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    Comparison comparison;
    for (int a = 1; a <= side_; ++a) {
      for (int b = 1; b <= side_; ++b) {
        RETURN_IF_ERROR(AddCosts({.a = a, .b = b}, comparison));
      }
    }
    std::vector<PoolTiming> pools;
    for (int ranks : {256, 3600, 4096}) pools.push_back(TimePool(ranks, {.c_q = 3, .c_kv = 2, .c_o = 5}));
    std::fputs(json_ ? Json(comparison, pools).c_str() : Text(comparison, pools).c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status AddCosts(Tile tile, Comparison& comparison) const {
    for (int c_q = 1; c_q <= max_cost_; ++c_q) {
      for (int c_kv = 1; c_kv <= max_cost_; ++c_kv) {
        for (int c_o = 1; c_o <= max_cost_; ++c_o) {
          RETURN_IF_ERROR(comparison.AddCase(tile, {.c_q = c_q, .c_kv = c_kv, .c_o = c_o}));
        }
      }
    }
    return absl::OkStatus();
  }

  static nlohmann::ordered_json Json(const Distribution& d) {
    return {{"min", d.min},
            {"mean", d.mean},
            {"p50", d.p50},
            {"p95", d.p95},
            {"p99", d.p99},
            {"max", d.max},
            {"above_1_02", d.above_1_02}};
  }

  std::string Json(const Comparison& comparison, const std::vector<PoolTiming>& pools) const {
    nlohmann::ordered_json json = {
        {"side", side_},
        {"max_cost", max_cost_},
        {"cases", comparison.greedy_time.size()},
        {"greedy_time", Json(DistributionOf(comparison.greedy_time))},
        {"optimal_time", Json(DistributionOf(comparison.optimal_time))},
        {"optimal_peak", Json(DistributionOf(comparison.optimal_peak))},
        {"seconds",
         {{"search", comparison.search.seconds()},
          {"greedy", comparison.greedy.seconds()},
          {"optimal", comparison.optimal.seconds()}}},
        {"pools", nlohmann::ordered_json::array()},
    };
    for (const PoolTiming& pool : pools) {
      json["pools"].push_back({{"ranks", pool.ranks},
                               {"shapes", pool.shapes},
                               {"greedy_seconds", pool.greedy_seconds},
                               {"optimal_seconds", pool.optimal_seconds},
                               {"plan_seconds", pool.plan_seconds},
                               {"windows_plan_seconds", pool.windows_plan_seconds}});
    }
    return absl::StrCat(json.dump(), "\n");
  }

  static std::string Row(const char* name, const Distribution& d) {
    return absl::StrFormat("%-29s %6.4f  %6.4f  %6.4f  %6.4f  %6.4f  %6.4f  %6.2f %%\n", name, d.min, d.mean,
                           d.p50, d.p95, d.p99, d.max, d.above_1_02 * 100);
  }

  std::string Text(const Comparison& comparison, const std::vector<PoolTiming>& pools) const {
    std::string text = absl::StrFormat(
        "%s cases: tiles up to %dx%d, costs 1 to %d\n"
        "%-29s    min    mean     p50     p95     p99     max    > 1.02\n",
        FormatCount(static_cast<double>(comparison.greedy_time.size())), side_, side_, max_cost_, "");
    absl::StrAppend(&text, Row("time, Algorithm 2 / exact", DistributionOf(comparison.greedy_time)),
                    Row("time, least / exact", DistributionOf(comparison.optimal_time)),
                    Row("peak, least / Algorithm 2", DistributionOf(comparison.optimal_peak)));
    absl::StrAppendFormat(&text,
                          "%.1f ms for the search, %.1f ms for Algorithm 2, %.1f ms for the least time\n",
                          comparison.search.seconds() * 1e3, comparison.greedy.seconds() * 1e3,
                          comparison.optimal.seconds() * 1e3);
    for (const PoolTiming& pool : pools) {
      absl::StrAppendFormat(
          &text,
          "%4d ranks, %2d shapes: Algorithm 2 %5.1f ms, least time %5.1f ms, the whole plan %5.1f ms, "
          "of windows of %d %5.1f ms\n",
          pool.ranks, pool.shapes, pool.greedy_seconds * 1e3, pool.optimal_seconds * 1e3,
          pool.plan_seconds * 1e3, kWindow, pool.windows_plan_seconds * 1e3);
    }
    return text;
  }

  int side_ = 6;
  int max_cost_ = 8;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchSchedulesCommand(CLI::App& parent) {
  return std::make_unique<BenchSchedulesCommand>(parent);
}

}  // namespace meshfill
