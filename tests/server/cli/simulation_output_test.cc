// Made-up reports as text and as JSON, in full: every figure in its place and its unit.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "server/cli/scenario.h"
#include "server/cli/simulation_report.h"

namespace meshfill {
namespace {

using sim::StrategyKind;

sim::Cluster ACluster() {
  return {.gpus_per_node = 4,
          .same_node = {.latency_seconds = 5e-6, .bytes_per_second = 100e9},
          .between_nodes = {.latency_seconds = 1e-5, .bytes_per_second = 10e9},
          .node_bytes_per_second = 20e9,
          .attention_flops_per_second = 150e12};
}

sim::AttentionJob AJob() { return {.tokens = 65536, .q_heads = 8, .kv_heads = 2, .head_dim = 64}; }

sim::PassResult APass(const std::string& settings, double seconds) {
  sim::PassResult pass = {.settings = settings, .seconds = seconds, .compute_seconds = seconds / 2};
  int64_t number = 0;
  for (const Traffic traffic : kAllTraffics) {
    ++number;
    pass.wait_seconds[traffic] = 0.5 * static_cast<double>(number);
    pass.sent_bytes[traffic] = 1000 * number;
  }
  pass.peak_bytes = 77;
  return pass;
}

// `seconds` of each pass.
sim::StrategyResult AResult(StrategyKind kind, const std::vector<double>& seconds) {
  sim::StrategyResult result = {.kind = kind};
  for (const double each : seconds) {
    result.passes.push_back(APass(std::string(sim::StrategyName(kind)) + " here", each));
  }
  return result;
}

TEST(Comparison, FindsWhatAppliesAndTheFastestRival) {
  const Comparison comparison = {
      .job = AJob(),
      .gpus = 8,
      .results = {AResult(StrategyKind::kPlanned, {0.5, 0.5}), AResult(StrategyKind::kRing, {}),
                  AResult(StrategyKind::kUsp, {1, 4}), AResult(StrategyKind::kBurst, {2, 2})}};
  EXPECT_EQ(comparison.Find(StrategyKind::kUsp), &comparison.results[2]);
  EXPECT_EQ(comparison.Find(StrategyKind::kRing), nullptr) << "it does not apply";
  EXPECT_EQ(comparison.Find(StrategyKind::kTasp), nullptr) << "it was not asked for";
  EXPECT_EQ(comparison.FastestRivalSeconds(), 4);
  EXPECT_EQ(comparison.FastestRivalSeconds(0), 1);
  EXPECT_EQ(comparison.FastestRivalSeconds(1), 2);
  EXPECT_EQ(Comparison{.results = {AResult(StrategyKind::kPlanned, {1})}}.FastestRivalSeconds(),
            std::numeric_limits<double>::infinity());
}

struct Made {
  Scenario scenario;
  SimulationReport report;
};

Made Strategies() {
  Made made;
  made.scenario.strategies = {StrategyKind::kRing, StrategyKind::kPaperMesh, StrategyKind::kTwoWayRing,
                              StrategyKind::kPlanned, StrategyKind::kPlannedLanes};
  made.scenario.job = AJob();
  made.scenario.passes = {sim::Pass::kForward, sim::Pass::kBackward};
  made.report.cluster = ACluster();
  for (const int gpus : {8, 256}) {
    const double of = 8.0 / gpus;
    // Slower than the ring forward, faster backward.
    made.report.comparisons.push_back({.job = AJob(),
                                       .gpus = gpus,
                                       .results = {AResult(StrategyKind::kRing, {1 * of, 4 * of}),
                                                   AResult(StrategyKind::kPaperMesh, {3 * of, 3 * of}),
                                                   AResult(StrategyKind::kTwoWayRing, {}),
                                                   AResult(StrategyKind::kPlanned, {1.25 * of, 1.25 * of}),
                                                   AResult(StrategyKind::kPlannedLanes, {1 * of, 1 * of})}});
  }
  return made;
}

TEST(SimulationText, HasALineForEachNumberOfGpus) {
  const Made made = Strategies();
  EXPECT_EQ(SimulationText(made.scenario, made.report), R"(cluster of 4 GPUs a node
  attention      150 TFLOP/s a GPU
  same node      100 GB/s a flow, 0.005 ms until it starts
  between nodes  10 GB/s a flow, 0.01 ms until it starts
  node           20 GB/s each way, shared by its flows

65536 tokens, 8 query heads and 2 KV heads of 64, causal, forward and backward: seconds
 gpus      ring paper_mesh two_way_ring   planned planned_lanes   gain*  planned
    8         5          6            -       2.5             2    2.40  planned here  |  planned here
  256    0.1562     0.1875            -   0.07812        0.0625    2.40  planned here  |  planned here
* of planned over paper_mesh
planned: never slower than the fastest rival, in 2 sizes; the rival takes 2.000 times as long in the geometric mean
planned, forward alone: slower than the fastest rival in 2 of 2 sizes, by 25 % at most; the rival takes 0.800 times as long in the geometric mean
planned, backward alone: never slower than the fastest rival, in 2 sizes; the rival takes 2.400 times as long in the geometric mean
planned_lanes: never slower than the fastest rival, in 2 sizes; the rival takes 2.500 times as long in the geometric mean
planned_lanes, forward alone: never slower than the fastest rival, in 2 sizes; the rival takes 1.000 times as long in the geometric mean
planned_lanes, backward alone: never slower than the fastest rival, in 2 sizes; the rival takes 3.000 times as long in the geometric mean
)");
}

TEST(SimulationText, LeavesOutWhatIsNotThere) {
  Made made = Strategies();
  made.scenario.strategies = {StrategyKind::kRing};
  made.scenario.passes = {sim::Pass::kForward};
  made.scenario.job.causal = false;
  made.report.cluster.node_bytes_per_second = sim::Cluster::kUnshared;
  made.report.comparisons = {{.job = AJob(), .gpus = 16, .results = {AResult(StrategyKind::kRing, {0.125})}}};
  EXPECT_EQ(SimulationText(made.scenario, made.report), R"(cluster of 4 GPUs a node
  attention      150 TFLOP/s a GPU
  same node      100 GB/s a flow, 0.005 ms until it starts
  between nodes  10 GB/s a flow, 0.01 ms until it starts

65536 tokens, 8 query heads and 2 KV heads of 64, full, forward: seconds
 gpus      ring   gain*  planned
   16     0.125       -  -
* of planned over paper_mesh
)");

  // One pass has no standings of its own; of another with the plan alone there is nothing to compare.
  made.scenario.strategies = {StrategyKind::kRing, StrategyKind::kPlanned};
  made.report.comparisons.front().results.push_back(AResult(StrategyKind::kPlanned, {0.25}));
  made.report.comparisons.push_back(
      {.job = AJob(), .gpus = 32, .results = {AResult(StrategyKind::kPlanned, {0.125})}});
  const std::string text = SimulationText(made.scenario, made.report);
  EXPECT_NE(
      text.find("\nplanned: slower than the fastest rival in 1 of 1 sizes, by 1e+02 % at most; the rival "
                "takes 0.500 times as long in the geometric mean\n"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("alone"), std::string::npos) << text;
}

TEST(SimulationJson, HasEveryFigureOfEveryPass) {
  Made made = Strategies();
  made.report.comparisons.pop_back();
  EXPECT_EQ(
      SimulationJson(made.scenario, made.report),
      R"({"cluster":{"gpus_per_node":4,"same_node":{"latency_seconds":5e-06,)"
      R"("flow_bytes_per_second":100000000000.0},"between_nodes":{"latency_seconds":1e-05,)"
      R"("flow_bytes_per_second":10000000000.0},"node_bytes_per_second":20000000000.0,)"
      R"("attention_flops_per_second":150000000000000.0},"comparisons":[{"tokens":65536,"causal":true,)"
      R"("gpus":8,"strategies":{"ring":{"seconds":5.0,"passes":[{"settings":"ring here","seconds":1.0,)"
      R"("compute_seconds":0.5,"wait_seconds":{"recv_q":0.5,"recv_kv":1.0,"send_o":1.5,"send_dq":2.0,)"
      R"("send_dkv":2.5,"all_to_all":3.0,"gather":3.5},"sent_bytes":{"recv_q":1000,"recv_kv":2000,)"
      R"("send_o":3000,"send_dq":4000,"send_dkv":5000,"all_to_all":6000,"gather":7000},"peak_bytes":77},{)"
      R"("settings":"ring here","seconds":4.0,"compute_seconds":2.0,"wait_seconds":{"recv_q":0.5,)"
      R"("recv_kv":1.0,"send_o":1.5,"send_dq":2.0,"send_dkv":2.5,"all_to_all":3.0,"gather":3.5},)"
      R"("sent_bytes":{"recv_q":1000,"recv_kv":2000,"send_o":3000,"send_dq":4000,"send_dkv":5000,)"
      R"("all_to_all":6000,"gather":7000},"peak_bytes":77}]},"paper_mesh":{"seconds":6.0,"passes":[{)"
      R"("settings":"paper_mesh here","seconds":3.0,"compute_seconds":1.5,"wait_seconds":{"recv_q":0.5,)"
      R"("recv_kv":1.0,"send_o":1.5,"send_dq":2.0,"send_dkv":2.5,"all_to_all":3.0,"gather":3.5},)"
      R"("sent_bytes":{"recv_q":1000,"recv_kv":2000,"send_o":3000,"send_dq":4000,"send_dkv":5000,)"
      R"("all_to_all":6000,"gather":7000},"peak_bytes":77},{"settings":"paper_mesh here","seconds":3.0,)"
      R"("compute_seconds":1.5,"wait_seconds":{"recv_q":0.5,"recv_kv":1.0,"send_o":1.5,"send_dq":2.0,)"
      R"("send_dkv":2.5,"all_to_all":3.0,"gather":3.5},"sent_bytes":{"recv_q":1000,"recv_kv":2000,)"
      R"("send_o":3000,"send_dq":4000,"send_dkv":5000,"all_to_all":6000,"gather":7000},)"
      R"("peak_bytes":77}]},"planned":{"seconds":2.5,"passes":[{"settings":"planned here","seconds":1.25,)"
      R"("compute_seconds":0.625,"wait_seconds":{"recv_q":0.5,"recv_kv":1.0,"send_o":1.5,"send_dq":2.0,)"
      R"("send_dkv":2.5,"all_to_all":3.0,"gather":3.5},"sent_bytes":{"recv_q":1000,"recv_kv":2000,)"
      R"("send_o":3000,"send_dq":4000,"send_dkv":5000,"all_to_all":6000,"gather":7000},"peak_bytes":77},{)"
      R"("settings":"planned here","seconds":1.25,"compute_seconds":0.625,"wait_seconds":{"recv_q":0.5,)"
      R"("recv_kv":1.0,"send_o":1.5,"send_dq":2.0,"send_dkv":2.5,"all_to_all":3.0,"gather":3.5},)"
      R"("sent_bytes":{"recv_q":1000,"recv_kv":2000,"send_o":3000,"send_dq":4000,"send_dkv":5000,)"
      R"("all_to_all":6000,"gather":7000},"peak_bytes":77}]},"planned_lanes":{"seconds":2.0,"passes":[{)"
      R"("settings":"planned_lanes here","seconds":1.0,"compute_seconds":0.5,"wait_seconds":{)"
      R"("recv_q":0.5,"recv_kv":1.0,"send_o":1.5,"send_dq":2.0,"send_dkv":2.5,"all_to_all":3.0,)"
      R"("gather":3.5},"sent_bytes":{"recv_q":1000,"recv_kv":2000,"send_o":3000,"send_dq":4000,)"
      R"("send_dkv":5000,"all_to_all":6000,"gather":7000},"peak_bytes":77},{)"
      R"("settings":"planned_lanes here","seconds":1.0,"compute_seconds":0.5,"wait_seconds":{)"
      R"("recv_q":0.5,"recv_kv":1.0,"send_o":1.5,"send_dq":2.0,"send_dkv":2.5,"all_to_all":3.0,)"
      R"("gather":3.5},"sent_bytes":{"recv_q":1000,"recv_kv":2000,"send_o":3000,"send_dq":4000,)"
      R"("send_dkv":5000,"all_to_all":6000,"gather":7000},"peak_bytes":77}]}}}]})");
  made.report.cluster.node_bytes_per_second = sim::Cluster::kUnshared;
  EXPECT_NE(SimulationJson(made.scenario, made.report).find(R"("node_bytes_per_second":null)"),
            std::string::npos);
}

sim::ThroughputTable ATable(double scale) {
  sim::ThroughputTable table;
  table.rows = {{.cell = {.causal = true, .tokens = 131072, .gpus = 32, .ring = 40, .mesh = 50},
                 .ring_seconds = 3 * scale,
                 .mesh_seconds = 1 * scale,
                 .mesh_tiles = "4x8 / 8x4"},
                {.cell = {.causal = false, .tokens = 262144, .gpus = 256, .ring = 20, .mesh = 80},
                 .ring_seconds = 4 * scale,
                 .mesh_seconds = 1.5 * scale,
                 .mesh_tiles = "16x16 / 16x16"}};
  table.ring_rms_error = 0.125 * scale;
  table.mesh_mean_error = 0.25 * scale;
  table.by_gpus = {{.gpus = 32, .mesh_mean_error = 0.1, .mesh_bias = -0.05, .gain_ratio = 1.5 * scale},
                   {.gpus = 256, .mesh_mean_error = 0.2, .mesh_bias = 0.15, .gain_ratio = 1.25 * scale}};
  return table;
}

Made Paper() {
  Made made = Strategies();
  made.scenario.report = Scenario::Report::kMeshAttentionPaper;
  made.report.throughput = ATable(1);
  made.report.flat_throughput = ATable(2);
  made.report.utilisation = {.peak_flops_per_second = 210e12, .largest_error = 0.75};
  made.report.memory = {{.cell = {.causal = true, .tokens = 131072, .gpus = 32, .ring = 4, .mesh = 5},
                         .ring_gib = 2,
                         .mesh_gib = 7.5,
                         .mesh_tile = "4x8",
                         .ours_gib = 1.5,
                         .nearest_tile = "8x4",
                         .nearest_gib = 6,
                         .nearest_seconds = 3},
                        {.cell = {.causal = false, .tokens = 262144, .gpus = 256, .ring = 8, .mesh = 9},
                         .ring_gib = 6,
                         .mesh_gib = 18,
                         .mesh_tile = "16x16",
                         .ours_gib = 2.5,
                         .nearest_tile = "32x8",
                         .nearest_gib = 8,
                         .nearest_seconds = 1}};
  made.report.comparisons.front().job.causal = false;
  return made;
}

TEST(SimulationText, HasThePapersTables) {
  Made made = Paper();
  EXPECT_EQ(SimulationText(made.scenario, made.report), R"(cluster of 4 GPUs a node
  attention      150 TFLOP/s a GPU
  same node      100 GB/s a flow, 0.005 ms until it starts
  between nodes  10 GB/s a flow, 0.01 ms until it starts
  node           20 GB/s each way, shared by its flows

Table 3: seconds of attention forward and backward
mask     tokens  gpus   ring measured/sim  error   mesh measured/sim  error  mesh tiles forward / backward
causal   131072    32       2.50     3.00   +20%       2.00     1.00   -50%  4x8 / 8x4
full     262144   256       5.00     4.00   -20%       1.25     1.50   +20%  16x16 / 16x16
shared node links: ring 12.5 % rms, mesh 25.0 % on average
    32 gpus  mesh 10.0 % ( -5.0 %), its gain over ring 1.50 times the measured one
   256 gpus  mesh 20.0 % (+15.0 %), its gain over ring 1.25 times the measured one
flat, nothing shared: ring 25.0 % rms, mesh 50.0 % on average
    32 gpus  mesh 10.0 % ( -5.0 %), its gain over ring 3.00 times the measured one
   256 gpus  mesh 20.0 % (+15.0 %), its gain over ring 2.50 times the measured one
the flat cluster fits ring as well, and promises a gain that mesh had not: its flows share the nodes' links

Table 4: peak of 210.0 TFLOP/s a GPU, or 180.0 where MFU leaves out the repeated product of the backward pass, as is usual;
MFU off by at most 0.75 points beyond rounding

Table 5: memory of attention forward, measured and simulated
mask     tokens  gpus        ring GiB factor        mesh GiB factor tile    executor  nearest factor  its seconds, measured/sim
causal   131072    32     4.0    2.00   2.00     5.0    7.50   1.50 4x8         1.50  8x4       1.20  2.00 3.00
full     262144   256     8.0    6.00   1.33     9.0   18.00   2.00 16x16       2.50  32x8      1.12  1.25 1.00
mesh within a factor of 1.5 in 1 of 2 cells with the tile of the paper's rule. `nearest`: the tile whose memory is nearest; some tile
always is, and the seconds of these are 35.0 % off on average, those of the rule's tiles 25.0 %. `executor`: the rule's tile with
chunks released at their last use and merged in place, as Meshfill does

Every strategy on this cluster: seconds of forward and backward
mask     tokens  gpus      ring paper_mesh two_way_ring   planned planned_lanes   gain*  planned
full      65536     8         5          6            -       2.5             2    2.40  planned here  |  planned here
causal    65536   256    0.1562     0.1875            -   0.07812        0.0625    2.40  planned here  |  planned here
* of planned over paper_mesh
planned: never slower than the fastest rival, in 2 sizes; the rival takes 2.000 times as long in the geometric mean
planned, forward alone: slower than the fastest rival in 2 of 2 sizes, by 25 % at most; the rival takes 0.800 times as long in the geometric mean
planned, backward alone: never slower than the fastest rival, in 2 sizes; the rival takes 2.400 times as long in the geometric mean
planned_lanes: never slower than the fastest rival, in 2 sizes; the rival takes 2.500 times as long in the geometric mean
planned_lanes, forward alone: never slower than the fastest rival, in 2 sizes; the rival takes 1.000 times as long in the geometric mean
planned_lanes, backward alone: never slower than the fastest rival, in 2 sizes; the rival takes 3.000 times as long in the geometric mean
)");
  made.report.throughput.rows.pop_back();  // a cell of Table 5 alone
  EXPECT_NE(SimulationText(made.scenario, made.report).find("  32x8      1.12  \n"), std::string::npos)
      << SimulationText(made.scenario, made.report);
}

TEST(SimulationJson, HasThePapersTables) {
  Made made = Paper();
  made.report.comparisons.clear();
  EXPECT_EQ(
      SimulationJson(made.scenario, made.report),
      R"({"cluster":{"gpus_per_node":4,"same_node":{"latency_seconds":5e-06,)"
      R"("flow_bytes_per_second":100000000000.0},"between_nodes":{"latency_seconds":1e-05,)"
      R"("flow_bytes_per_second":10000000000.0},"node_bytes_per_second":20000000000.0,)"
      R"("attention_flops_per_second":150000000000000.0},"throughput":{"ring_rms_error":0.125,)"
      R"("mesh_mean_error":0.25,"gain_ratio_at_most_gpus":1.25,"by_gpus":[{"gpus":32,)"
      R"("mesh_mean_error":0.1,"mesh_bias":-0.05,"gain_ratio":1.5},{"gpus":256,"mesh_mean_error":0.2,)"
      R"("mesh_bias":0.15,"gain_ratio":1.25}],"cells":[{"tokens":131072,"causal":true,"gpus":32,"ring":{)"
      R"("measured_seconds":2.5,"seconds":3.0},"mesh":{"measured_seconds":2.0,"seconds":1.0,)"
      R"("tiles":"4x8 / 8x4"}},{"tokens":262144,"causal":false,"gpus":256,"ring":{"measured_seconds":5.0,)"
      R"("seconds":4.0},"mesh":{"measured_seconds":1.25,"seconds":1.5,"tiles":"16x16 / 16x16"}}]},)"
      R"("flat_throughput":{"ring_rms_error":0.25,"mesh_mean_error":0.5,"gain_ratio_at_most_gpus":2.5,)"
      R"("by_gpus":[{"gpus":32,"mesh_mean_error":0.1,"mesh_bias":-0.05,"gain_ratio":3.0},{"gpus":256,)"
      R"("mesh_mean_error":0.2,"mesh_bias":0.15,"gain_ratio":2.5}],"cells":[{"tokens":131072,)"
      R"("causal":true,"gpus":32,"ring":{"measured_seconds":2.5,"seconds":6.0},"mesh":{)"
      R"("measured_seconds":2.0,"seconds":2.0,"tiles":"4x8 / 8x4"}},{"tokens":262144,"causal":false,)"
      R"("gpus":256,"ring":{"measured_seconds":5.0,"seconds":8.0},"mesh":{"measured_seconds":1.25,)"
      R"("seconds":3.0,"tiles":"16x16 / 16x16"}}]},"mfu":{"peak_flops_per_second":210000000000000.0,)"
      R"("usual_peak_flops_per_second":180000000000000.0,"largest_error_points":0.75},"memory":[{)"
      R"("tokens":131072,"causal":true,"gpus":32,"ring":{"measured_gib":4.0,"gib":2.0},"mesh":{)"
      R"("measured_gib":5.0,"gib":7.5,"tile":"4x8","executor_gib":1.5},"nearest":{"tile":"8x4","gib":6.0,)"
      R"("seconds":3.0}},{"tokens":262144,"causal":false,"gpus":256,"ring":{"measured_gib":8.0,)"
      R"("gib":6.0},"mesh":{"measured_gib":9.0,"gib":18.0,"tile":"16x16","executor_gib":2.5},"nearest":{)"
      R"("tile":"32x8","gib":8.0,"seconds":1.0}}],"comparisons":[]})");
}

Made Sweep() {
  Made made;
  made.scenario.report = Scenario::Report::kSweep;
  made.scenario.sweep.clusters = {{.name = "near", .cluster = ACluster()}};
  const sim::AttentionJob job = AJob();
  made.report.sweep = {{.cluster = "near",
                        .job = job,
                        .pass = sim::Pass::kForward,
                        .gpus = 8,
                        .planned = {.kind = StrategyKind::kPlanned, .settings = "2x4", .seconds = 0.5},
                        .rival = {.kind = StrategyKind::kUsp, .settings = "4 x 1x2", .seconds = 0.4},
                        .head_rings = 0.45,
                        .reason = sim::SlowerReason::kDoubleRing},
                       {.cluster = "near",
                        .job = job,
                        .pass = sim::Pass::kBackward,
                        .gpus = 16,
                        .planned = {.kind = StrategyKind::kPlanned, .settings = "4x4", .seconds = 0.25},
                        .rival = {.kind = StrategyKind::kRing, .settings = "1x16", .seconds = 1},
                        .reason = sim::SlowerReason::kOneMessage}};
  return made;
}

TEST(SimulationText, HasARowForEachCellOfASweepAndTheirSummary) {
  Made made = Sweep();
  EXPECT_EQ(
      SimulationText(made.scenario, made.report),
      R"(cluster          heads   tokens  gpus pass      planned ms plan                        rival ms fastest rival   its settings               ratio*  slower for want of
near               8/2    65536     8 forward          500 2x4                              400 usp             4 x 1x2                     0.800  double ring
near               8/2    65536    16 backward         250 4x4                             1000 ring            1x16                        4.000  one message
* of the fastest rival over planned
planned: slower than the fastest rival by more than 0.5 % in 1 of 2 cells, 1.250 times as long at most; the fastest rival takes 1.789 times as long in the geometric mean, the better of USP and LoongTrain 0.900 times
     1 for want of: double ring
)");
  made.report.sweep.erase(made.report.sweep.begin());
  const std::string text = SimulationText(made.scenario, made.report);
  EXPECT_NE(text.find("in 0 of 1 cells; the fastest rival takes 4.000 times as long in the geometric mean\n"),
            std::string::npos)
      << text;
}

TEST(SimulationJson, HasEveryCellOfASweepAndTheirSummary) {
  Made made = Sweep();
  EXPECT_EQ(
      SimulationJson(made.scenario, made.report),
      R"({"sweep":{"clusters":{"near":{"gpus_per_node":4,"same_node":{"latency_seconds":5e-06,)"
      R"("flow_bytes_per_second":100000000000.0},"between_nodes":{"latency_seconds":1e-05,)"
      R"("flow_bytes_per_second":10000000000.0},"node_bytes_per_second":20000000000.0,)"
      R"("attention_flops_per_second":150000000000000.0}},"cells":[{"cluster":"near","tokens":65536,)"
      R"("q_heads":8,"kv_heads":2,"gpus":8,"pass":"forward","planned":{"strategy":"planned",)"
      R"("settings":"2x4","seconds":0.5},"rival":{"strategy":"usp","settings":"4 x 1x2","seconds":0.4},)"
      R"("slower_for_want_of":"double ring"},{"cluster":"near","tokens":65536,"q_heads":8,"kv_heads":2,)"
      R"("gpus":16,"pass":"backward","planned":{"strategy":"planned","settings":"4x4","seconds":0.25},)"
      R"("rival":{"strategy":"ring","settings":"1x16","seconds":1.0},"slower_for_want_of":"one message"}],)"
      R"("slower":1,"most":1.25,"over_rivals":1.7888543819998317,"over_head_rings":0.9,"reasons":{)"
      R"("double ring":1}}})");
  made.report.sweep.erase(made.report.sweep.begin());
  EXPECT_NE(SimulationJson(made.scenario, made.report).find(R"("over_head_rings":null,"reasons":{})"),
            std::string::npos);
}

}  // namespace
}  // namespace meshfill
