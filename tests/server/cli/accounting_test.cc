// Where the time of attention goes, on a real engine: what ranks measure, what the metrics and the JSON say
// of it, and what measuring costs.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "engine/run/timeline_recorder.h"
#include "gtest/gtest.h"
#include "kernels/median.h"
#include "nlohmann/json.hpp"
#include "server/api/result_proto.h"
#include "server/cli/result_json.h"
#include "server/observe/metrics.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

constexpr int kRanks = 2;  // no more than cores: a rank that another one pushes off its core is idle
constexpr int64_t kTokens = 16384;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of "name{…} value" lines: the sum over all series of `name` with `label` in them.
double SumOf(const std::string& text, const std::string& name, const std::string& label) {
  double sum = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(name + "{", 0) != 0 || line.find(label) == std::string::npos) continue;
    sum += std::stod(line.substr(line.rfind(' ')));
  }
  return sum;
}

class AccountingTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const TempFolder folder;
    ASSERT_TRUE(MakeModel({.layers = 2, .hidden = 128}, folder / "model").ok());
    auto engine = LoadEmbeddedEngine({.model_path = folder / "model", .ranks = kRanks, .peak_flops = 1e11});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = engine->release();
  }
  static void TearDownTestSuite() { delete engine_; }

  static PrefillResult Prefill(const PrefillOptions& options) {
    std::vector<uint32_t> tokens(kTokens);
    std::minstd_rand random(7);
    for (uint32_t& token : tokens) token = random() % 256;
    auto result = RunPrefill(*engine_, {tokens, options});
    EXPECT_TRUE(result.ok()) << result.status();
    return *std::move(result);
  }

  static PrefillEngine* engine_;
};
PrefillEngine* AccountingTest::engine_ = nullptr;

// Blocks, merges and waits are timed one by one, attention around them: what neither of them covers is idle.
// A thread that loses its core between two spans is idle, too, so the quietest of a few runs counts.
TEST_F(AccountingTest, ComputeWaitAndIdleAreAttention) {
  constexpr int kRuns = 10;
  for (const PrefillOptions& options :
       {PrefillOptions{.tile = Tile{1, 2}}, PrefillOptions{.tile = Tile{2, 1}},
        PrefillOptions{.tile = Tile{1, 1}, .heads = 2}}) {
    double least_idle = 1;  // of a run's idlest rank, as a share of its attention
    std::string plan;
    for (int run = 0; run < kRuns && least_idle > 0.02; ++run) {
      const PrefillResult result = Prefill(options);
      plan = result.plan.DebugString();
      double idle = 0;
      for (const RankStats& stats : result.ranks) {
        const double told = stats.block_seconds + stats.merge_seconds + stats.comm_wait_seconds();
        EXPECT_LE(told, stats.attention_seconds * (1 + 1e-6)) << "something is counted twice";
        EXPECT_LE(stats.attention_seconds, stats.total_seconds);
        idle = std::max(idle, 1 - told / stats.attention_seconds);
      }
      least_idle = std::min(least_idle, idle);
    }
    EXPECT_LE(least_idle, 0.02) << plan;
  }
}

TEST_F(AccountingTest, MetricsAndJsonSayTheSame) {
  Metrics metrics;
  metrics.SetPool(PoolState::kReady, kRanks);
  const PrefillResult result = Prefill({.tile = Tile{2, 1}});
  metrics.OnPrefillDone(result);
  const std::string text = metrics.Text();
  double most_wait = 0, most_attention = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const RankStats& stats = result.ranks[rank];
    const std::string label = "rank=\"" + std::to_string(rank) + "\"";
    const double wait = SumOf(text, "meshfill_comm_wait_seconds_total", label);
    const double compute = SumOf(text, "meshfill_attention_compute_seconds_total", label);
    const double attention = SumOf(text, "meshfill_attention_seconds_total", label);
    EXPECT_NEAR(wait, stats.comm_wait_seconds(), 0.01 * stats.comm_wait_seconds());
    EXPECT_NEAR(compute, stats.block_seconds + stats.merge_seconds, 0.01 * compute);
    EXPECT_NEAR(attention, stats.attention_seconds, 0.01 * attention);
    most_wait = std::max(most_wait, wait);
    most_attention = std::max(most_attention, attention);
  }
  const auto json = nlohmann::json::parse(PrefillJson(ToProto(result, "id"), /*upload_seconds=*/0));
  EXPECT_NEAR(json.at("seconds").at("comm_wait").get<double>(), most_wait, 0.01 * most_wait);
  EXPECT_NEAR(json.at("seconds").at("attention").get<double>(), most_attention, 0.01 * most_attention);
}

TEST_F(AccountingTest, TheTraceSaysTheSame) {
  const PrefillResult result = Prefill({.tile = Tile{2, 1}, .keep_timeline = true});
  ASSERT_TRUE(result.timeline.has_value());
  for (int rank = 0; rank < kRanks; ++rank) {
    double wait = 0, blocks = 0;
    for (const Span& span : result.timeline->spans) {
      if (span.rank != rank) continue;
      if (span.kind == SpanKind::kWait) wait += span.seconds();
      if (span.what == "block") blocks += span.seconds();
    }
    EXPECT_NEAR(wait, result.ranks[rank].comm_wait_seconds(), 0.01 * wait + 1e-6);
    EXPECT_NEAR(blocks, result.ranks[rank].block_seconds, 0.01 * blocks);
  }
}

// Every span costs what a timer with a recorder costs; a prefill pays for its spans, its report and a scrape.
TEST_F(AccountingTest, MeasuringCostsOnePercentAtMost) {
  const PrefillResult result = Prefill({.tile = Tile{2, 1}, .keep_timeline = true});

  // Of several rounds the median: beside others on the machine one alone may stand still.
  constexpr int kRounds = 9, kSpans = 10'000;
  TimelineRecorder recorder(0, TimelineRecorder::Clock::now());
  Metrics metrics;
  double sink = 0;
  std::vector<double> of_a_span, of_a_report, of_a_scrape;
  for (int round = 0; round < kRounds; ++round) {
    const auto spans_start = std::chrono::steady_clock::now();
    for (int i = 0; i < kSpans; ++i) SpanTimer(&sink, &recorder, {.what = "block"});
    of_a_span.push_back(SecondsSince(spans_start) / kSpans);
    const auto report_start = std::chrono::steady_clock::now();
    metrics.OnPrefillDone(result);
    of_a_report.push_back(SecondsSince(report_start));
    const auto scrape_start = std::chrono::steady_clock::now();
    EXPECT_FALSE(metrics.Text().empty());
    of_a_scrape.push_back(SecondsSince(scrape_start));
  }
  const double span_seconds = Median(of_a_span), report_seconds = Median(of_a_report),
               scrape_seconds = Median(of_a_scrape);

  const double spans = static_cast<double>(result.timeline->spans.size());
  const double cost = spans * span_seconds + report_seconds + scrape_seconds;
  RecordProperty("percent", std::to_string(100 * cost / result.prefill_seconds));
  std::cout << spans << " spans of " << span_seconds * 1e9 << " ns, report " << report_seconds * 1e6
            << " us, scrape " << scrape_seconds * 1e6 << " us: " << 100 * cost / result.prefill_seconds
            << " % of " << result.prefill_seconds << " s\n";
  EXPECT_LT(cost, 0.01 * result.prefill_seconds);
}

}  // namespace
}  // namespace meshfill
