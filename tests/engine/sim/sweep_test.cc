#include "engine/sim/sweep.h"

#include <cmath>

#include "gtest/gtest.h"

namespace meshfill::sim {
namespace {

// Nodes of 4 with one slow port, and short prompts: rivals with two messages at once lead in some cells.
Sweep SmallSweep() {
  const Cluster slow = {.gpus_per_node = 4,
                        .same_node = {.latency_seconds = 1e-5, .bytes_per_second = 300e9},
                        .between_nodes = {.latency_seconds = 2e-5, .bytes_per_second = 11e9},
                        .node_bytes_per_second = 11e9,
                        .attention_flops_per_second = 600e12};
  Cluster fast = slow;
  fast.between_nodes.bytes_per_second = fast.node_bytes_per_second = 1e15;
  AttentionJob job{.tokens = 65536, .q_heads = 28, .kv_heads = 4, .head_dim = 128};
  AttentionJob long_job = job;
  long_job.tokens = 524288;
  return {.clusters = {{"slow", slow}, {"fast", fast}},
          .jobs = {job, long_job},
          .gpus = {8, 16},
          .passes = {Pass::kForward, Pass::kBackward}};
}

TEST(Sweep, ComparesEveryCellWithTheFastestRivalOfItsPass) {
  constexpr StrategyKind kKinds[] = {StrategyKind::kRing, StrategyKind::kUsp, StrategyKind::kLoongTrain,
                                     StrategyKind::kAllGather, StrategyKind::kTwoWayRing};
  const Sweep sweep = SmallSweep();
  const auto cells = RunSweep(sweep, kKinds);
  ASSERT_TRUE(cells.ok()) << cells.status();
  ASSERT_EQ(cells->size(), 2u * 2 * 2 * 2);
  for (const SweepResult& cell : *cells) {
    SCOPED_TRACE(cell.cluster + ", " + PassName(cell.pass) + ", " + std::to_string(cell.gpus));
    const Cluster& cluster = sweep.clusters[cell.cluster == "slow" ? 0 : 1].cluster;
    double fastest = 0, head_rings = 0;
    for (const StrategyKind kind : kKinds) {
      const auto result = RunStrategy(kind, cell.job, cell.pass, cell.gpus, cluster);
      ASSERT_TRUE(result.ok()) << result.status();
      if (!result->has_value() || kind == StrategyKind::kTwoWayRing) continue;  // no rival
      const double seconds = (*result)->seconds;
      fastest = fastest == 0 ? seconds : std::min(fastest, seconds);
      if (kind == StrategyKind::kRing || kind == StrategyKind::kAllGather) continue;
      head_rings = head_rings == 0 ? seconds : std::min(head_rings, seconds);
    }
    EXPECT_EQ(cell.rival.seconds, fastest);
    EXPECT_EQ(cell.head_rings, head_rings);
    EXPECT_EQ(cell.planned.kind, StrategyKind::kPlanned);
    EXPECT_EQ(cell.slower(), cell.reason != SlowerReason::kNone);
  }
}

TEST(Sweep, NamesWhatThePlanLacks) {
  const auto reason = [](StrategyKind rival, Pass pass, int gpus) {
    Sweep sweep = SmallSweep();
    sweep.clusters.pop_back();
    sweep.jobs.pop_back();
    sweep.passes = {pass};
    sweep.gpus = {gpus};
    const auto cells = RunSweep(sweep, std::span(&rival, 1));
    EXPECT_TRUE(cells.ok() && cells->size() == 1) << cells.status();
    return SlowerReasonName(cells->front().reason);
  };
  EXPECT_STREQ(reason(StrategyKind::kLoongTrain, Pass::kBackward, 4), "one message");
  EXPECT_STREQ(reason(StrategyKind::kLoongTrain, Pass::kForward, 32), "");
  EXPECT_STREQ(reason(StrategyKind::kLoongTrain, Pass::kForward, 8), "");
  EXPECT_STREQ(reason(StrategyKind::kRing, Pass::kForward, 8), "");
  EXPECT_STREQ(reason(StrategyKind::kAllGather, Pass::kForward, 16), "");
}

TEST(Sweep, LeavesOutCellsWithoutARival) {
  constexpr StrategyKind kKinds[] = {StrategyKind::kPlanned,
                                     StrategyKind::kTasp};  // which has no backward pass
  const auto cells = RunSweep(SmallSweep(), kKinds);
  ASSERT_TRUE(cells.ok()) << cells.status();
  ASSERT_EQ(cells->size(), 8u);
  for (const SweepResult& cell : *cells) {
    EXPECT_EQ(cell.pass, Pass::kForward);
    EXPECT_EQ(cell.rival.kind, StrategyKind::kTasp);
    EXPECT_FALSE(cell.head_rings.has_value());
  }
}

TEST(Sweep, SumsUp) {
  const auto cell = [](double planned, double rival, std::optional<double> head_rings, SlowerReason reason) {
    SweepResult result;
    result.planned.seconds = planned;
    result.rival.seconds = rival;
    result.head_rings = head_rings;
    result.reason = reason;
    return result;
  };
  const std::vector<SweepResult> cells = {
      cell(1, 2, 2, SlowerReason::kNone), cell(1.004, 1, std::nullopt, SlowerReason::kNone),
      cell(1.006, 1, 1, SlowerReason::kDoubleRing), cell(2, 1, 4, SlowerReason::kOneMessage),
      cell(3, 2, 3, SlowerReason::kOneMessage)};
  const SweepSummary summary = SummaryOf(cells);
  EXPECT_EQ(summary.cells, 5);
  EXPECT_EQ(summary.slower, 3);
  EXPECT_EQ(summary.most, 2);
  EXPECT_NEAR(summary.over_rivals, std::pow(2 / 1.004 / 1.006 / 2 * 2 / 3, 1.0 / 5), 1e-12);
  EXPECT_NEAR(summary.over_head_rings.value(), std::pow(2 / 1.006 * 2 * 1, 1.0 / 4), 1e-12);
  const std::vector<std::pair<SlowerReason, int>> reasons = {{SlowerReason::kOneMessage, 2},
                                                             {SlowerReason::kDoubleRing, 1}};
  EXPECT_EQ(summary.reasons, reasons);
  EXPECT_EQ(SummaryOf({}).cells, 0);
  EXPECT_EQ(SummaryOf({}).over_rivals, 1);
}

}  // namespace
}  // namespace meshfill::sim
