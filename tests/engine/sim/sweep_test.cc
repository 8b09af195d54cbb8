#include "engine/sim/sweep.h"

#include <cmath>
#include <limits>
#include <set>

#include "engine/sim/lockstep.h"
#include "engine/sim/simulator.h"
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

TEST(Sweep, NamesEveryReason) {
  EXPECT_STREQ(SlowerReasonName(SlowerReason::kNone), "");
  EXPECT_STREQ(SlowerReasonName(SlowerReason::kEstimate), "estimate");
  EXPECT_STREQ(SlowerReasonName(SlowerReason::kOneMessage), "one message");
  EXPECT_STREQ(SlowerReasonName(SlowerReason::kDoubleRing), "double ring");
  EXPECT_STREQ(SlowerReasonName(SlowerReason::kParallelRings), "parallel rings");
  EXPECT_STREQ(SlowerReasonName(SlowerReason::kCollectives), "collectives");
}

TEST(Strategies, HaveNamesOfTheirOwn) {
  std::set<StrategyKind> kinds;
  for (const StrategyKind kind : AllStrategies()) {
    kinds.insert(kind);
    const auto parsed = ParseStrategy(StrategyName(kind));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, kind);
  }
  EXPECT_EQ(kinds.size(), static_cast<size_t>(kStrategyKinds));
  const absl::Status refused = ParseStrategy("rung").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  for (const StrategyKind kind : kinds) {
    EXPECT_NE(refused.message().find(StrategyName(kind)), std::string::npos) << refused;
  }
}

TEST(Strategies, AreRunnableOrRivals) {
  using enum StrategyKind;
  for (const StrategyKind kind : AllStrategies()) {
    const bool runnable = kind == kRing || kind == kPassQ || kind == kPaperMesh || kind == kUlysses ||
                          kind == kUsp || kind == kPlanned;
    EXPECT_EQ(IsRunnable(kind), runnable) << StrategyName(kind);
    EXPECT_EQ(IsRival(kind), kind != kPlanned && kind != kPlannedLanes && kind != kTwoWayRing);
  }
}

// The fastest settings on 8 GPUs behind slow ports, and on 12 behind fast ones; "": the strategy has none.
TEST(Strategies, TakeTheFastestOfTheirOwnSettings) {
  using enum StrategyKind;
  const struct {
    StrategyKind kind;
    const char *slow_forward, *slow_backward, *fast_forward, *fast_backward;
  } cases[] = {
      {kRing, "1x8", "1x8", "1x12", "1x12"},
      {kPassQ, "8x1", "8x1", "12x1", "12x1"},
      {kPaperMesh, "4x2", "4x2", "1x12", "4x3"},
      {kUlysses, "", "", "", ""},
      {kUsp, "4·1x2", "4·1x2", "1x12", "1x1x12, row-first"},
      {kBurst, "1x2x4, row-first", "1x2x4, row-first", "1x12x1, row-first", "1x4x3, box 1x4x1"},
      {kLoongTrain, "1x2x4, row-first", "4x2x1, row-first", "1x12x1, row-first", "1x4x3, box 1x4x1"},
      {kStarTrail, "4·C=1, row-first", "4·C=1, row-first", "C=1, row-first", "C=1, row-first"},
      {kTwoWayRing, "both ways", "", "both ways", ""},
      {kAllGather, "1·8, 4 rings, gathered", "", "1·12, 4 rings, gathered", ""},
      {kAttention2d, "4·1x2, overlapped, row-first", "", "1x12, overlapped, row-first", ""},
      {kTasp, "4·2, 1 ring", "", "1·12, 1 ring", ""},
      {kTensorParallel, "4·2, 1 ring", "", "2·6, 1 ring", ""},
  };
  const Sweep sweep = SmallSweep();
  const auto settings = [&](StrategyKind kind, Pass pass, bool slow) {
    const auto result =
        RunStrategy(kind, sweep.jobs[0], pass, slow ? 8 : 12, sweep.clusters[slow ? 0 : 1].cluster);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() && result->has_value() ? (*result)->settings : std::string();
  };
  for (const auto& [kind, slow_forward, slow_backward, fast_forward, fast_backward] : cases) {
    SCOPED_TRACE(StrategyName(kind));
    EXPECT_EQ(settings(kind, Pass::kForward, true), slow_forward);
    EXPECT_EQ(settings(kind, Pass::kBackward, true), slow_backward);
    EXPECT_EQ(settings(kind, Pass::kForward, false), fast_forward);
    EXPECT_EQ(settings(kind, Pass::kBackward, false), fast_backward);
  }
  const auto alone = RunStrategy(kUlysses, sweep.jobs[0], Pass::kForward, 4, sweep.clusters[0].cluster);
  ASSERT_TRUE(alone.ok() && alone->has_value()) << alone.status();
  EXPECT_EQ((*alone)->settings, "4·1x1");
}

TEST(Strategies, SumUpWhatTheirRanksDid) {
  const Sweep sweep = SmallSweep();
  for (const StrategyKind kind : AllStrategies()) {
    const auto result = RunStrategy(kind, sweep.jobs[0], Pass::kForward, 4, sweep.clusters[0].cluster);
    ASSERT_TRUE(result.ok() && result->has_value()) << result.status();
    const PassResult& pass = **result;
    const auto again = Simulate(pass.program, pass.placement, sweep.clusters[0].cluster);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(pass.seconds, again->seconds);
    EXPECT_EQ(pass.sent_bytes, pass.program.sent_bytes);
    EXPECT_EQ(pass.peak_bytes, pass.program.peak_bytes);
    double compute = 0, wait = 0;
    for (const RankTimes& rank : again->ranks) {
      compute += rank.compute_seconds / 4;
      wait += rank.wait_seconds.total() / 4;
    }
    EXPECT_NEAR(pass.compute_seconds, compute, 1e-12);
    EXPECT_NEAR(pass.wait_seconds.total(), wait, 1e-12);
  }
}

// One setting by the estimate is no faster than the fastest of several in the simulation.
TEST(Strategies, SimulateThoseThatTheEstimateFindsFastest) {
  const Sweep sweep = SmallSweep();
  const Cluster& cluster = sweep.clusters[0].cluster;
  for (const StrategyKind kind :
       {StrategyKind::kUsp, StrategyKind::kLoongTrain, StrategyKind::kAttention2d}) {
    double estimated = 0, simulated = std::numeric_limits<double>::infinity();
    for (const int shortlist : {1, 2, 4, 1000}) {
      const auto result = RunStrategy(kind, sweep.jobs[0], Pass::kForward, 16, cluster, shortlist);
      ASSERT_TRUE(result.ok() && result->has_value()) << result.status();
      const PassResult& pass = **result;
      EXPECT_LE(pass.seconds, simulated);
      simulated = pass.seconds;
      const double estimate = LockstepSeconds(pass.program, pass.placement, cluster);
      if (shortlist == 1) estimated = estimate;
      EXPECT_GE(estimate, estimated);
    }
  }
}

TEST(Strategies, RefuseWhatCannotBeSimulated) {
  const Sweep sweep = SmallSweep();
  const auto status_of = [](const AttentionJob& job, int ranks, const Cluster& cluster) {
    return RunStrategy(StrategyKind::kRing, job, Pass::kForward, ranks, cluster).status().code();
  };
  AttentionJob no_job = sweep.jobs[0];
  no_job.kv_heads = 0;
  Cluster no_cluster = sweep.clusters[0].cluster;
  no_cluster.gpus_per_node = 0;
  EXPECT_EQ(status_of(no_job, 8, sweep.clusters[0].cluster), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status_of(sweep.jobs[0], 8, no_cluster), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status_of(sweep.jobs[0], 0, sweep.clusters[0].cluster), absl::StatusCode::kInvalidArgument);
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
