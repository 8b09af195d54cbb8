#include "server/cli/scenario.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/cli/simulation_report.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

std::string ScenarioPath(const std::string& name) {
  return std::string(MESHFILL_CONFIGS) + "/scenarios/" + name;
}

constexpr char kGood[] = R"(
cluster:
  gpus_per_node: 4
  same_node: {latency: 5us, flow_bytes_per_second: 100e9}
  between_nodes: {latency: 10us, flow_bytes_per_second: 10e9}
  node_bytes_per_second: 20e9
  attention_flops_per_second: 100e12
attention: {tokens: 65536, q_heads: 8, kv_heads: 2, head_dim: 64}
gpus: 4, 8
strategies: ring, usp, startrail, planned
)";

absl::StatusOr<Scenario> LoadText(const std::string& text) {
  const std::string path = testing::TempDir() + "/scenario.yaml";
  std::ofstream(path) << text;
  return LoadScenario(path);
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Scenario, EveryCommittedOneLoads) {
  for (const char* name :
       {"paper_cluster.yaml", "paper_cluster_forward.yaml", "h100_nodes.yaml", "ethernet.yaml"}) {
    const auto scenario = LoadScenario(ScenarioPath(name));
    EXPECT_TRUE(scenario.ok()) << scenario.status();
  }
}

TEST(Scenario, ReadsWhatItSays) {
  const auto scenario = LoadText(kGood);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  EXPECT_EQ(scenario->gpus, (std::vector<int>{4, 8}));
  EXPECT_EQ(scenario->cluster.gpus_per_node, 4);
  EXPECT_DOUBLE_EQ(scenario->cluster.between_nodes.latency_seconds, 10e-6);
  EXPECT_DOUBLE_EQ(scenario->cluster.node_bytes_per_second, 20e9);
  EXPECT_EQ(scenario->job.kv_heads, 2);
  EXPECT_TRUE(scenario->job.causal);
  EXPECT_EQ(scenario->job.wire.element, 2);
  EXPECT_EQ(scenario->job.wire.partial, 4);
  EXPECT_EQ(scenario->passes.size(), 1u);
  EXPECT_EQ(scenario->strategies.size(), 4u);
}

TEST(Scenario, ReadsEveryKey) {
  const auto scenario = LoadText(R"(
cluster:
  gpus_per_node: 4
  same_node: {latency: 5us, flow_bytes_per_second: 100e9}
  between_nodes: {latency: 10us, flow_bytes_per_second: 10e9}
  attention_flops_per_second: 100e12
  block_overhead: 7us
  variation: {straggler_share: 0.25, straggler_slowdown: 3, jitter: 0.125, seed: 9}
attention: {tokens: 65536, q_heads: 8, kv_heads: 2, head_dim: 64, mask: full, dtype: f32, partial_dtype: bf16,
            gradient_dtype: f32}
gpus: 4096
strategies: usp, ring
passes: backward
)");
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  EXPECT_EQ(scenario->report, Scenario::Report::kStrategies);
  const sim::Cluster& cluster = scenario->cluster;
  EXPECT_DOUBLE_EQ(cluster.same_node.latency_seconds, 5e-6);
  EXPECT_DOUBLE_EQ(cluster.same_node.bytes_per_second, 100e9);
  EXPECT_DOUBLE_EQ(cluster.between_nodes.bytes_per_second, 10e9);
  EXPECT_EQ(cluster.node_bytes_per_second, sim::Cluster::kUnshared);
  EXPECT_DOUBLE_EQ(cluster.attention_flops_per_second, 100e12);
  EXPECT_DOUBLE_EQ(cluster.block_overhead_seconds, 7e-6);
  EXPECT_EQ(cluster.variation.straggler_share, 0.25);
  EXPECT_EQ(cluster.variation.straggler_slowdown, 3);
  EXPECT_EQ(cluster.variation.jitter, 0.125);
  EXPECT_EQ(cluster.variation.seed, 9u);
  const sim::AttentionJob& job = scenario->job;
  EXPECT_EQ(job.tokens, 65536);
  EXPECT_EQ(job.q_heads, 8);
  EXPECT_EQ(job.head_dim, 64);
  EXPECT_FALSE(job.causal);
  EXPECT_EQ(job.wire.element, 4);
  EXPECT_EQ(job.wire.partial, 2);
  EXPECT_EQ(job.wire.gradient, 4);
  EXPECT_EQ(scenario->gpus, std::vector<int>{4096});
  EXPECT_EQ(scenario->strategies,
            (std::vector<sim::StrategyKind>{sim::StrategyKind::kUsp, sim::StrategyKind::kRing}));
  EXPECT_EQ(scenario->passes, std::vector<sim::Pass>{sim::Pass::kBackward});
}

TEST(Scenario, HasDefaults) {
  const std::string wire = Replaced(kGood, "head_dim: 64", "head_dim: 64, gradient_dtype: bf16");
  const auto scenario =
      LoadText(Replaced(Replaced(wire, "  gpus_per_node: 4\n", ""),
                        "strategies: ring, usp, startrail, planned", "passes: forward_backward"));
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  EXPECT_EQ(scenario->cluster.gpus_per_node, 8);
  EXPECT_EQ(scenario->cluster.block_overhead_seconds, 0);
  EXPECT_EQ(scenario->cluster.variation.straggler_share, 0);
  EXPECT_EQ(scenario->cluster.variation.straggler_slowdown, 1);
  EXPECT_EQ(scenario->cluster.variation.seed, 1u);
  EXPECT_EQ(scenario->job.wire.partial, 4);
  EXPECT_EQ(scenario->job.wire.gradient, 2);
  EXPECT_EQ(scenario->strategies.size(), static_cast<size_t>(sim::kStrategyKinds));
  EXPECT_EQ(scenario->passes, (std::vector<sim::Pass>{sim::Pass::kForward, sim::Pass::kBackward}));
}

// Each table goes where it belongs.
TEST(Scenario, ReadsThePapersTables) {
  const TempFolder folder;
  for (const auto& [name, ring] :
       {std::pair("speed", "1"), std::pair("mfu", "2"), std::pair("memory", "3")}) {
    folder.Write(name, std::string("causal,seqlen,gpus,ring,mesh\nY,131072,32,") + ring + ",4\n");
  }
  const std::string good = Replaced(kGood, "gpus: 4, 8",
                                    "report: mesh_attention_paper\n"
                                    "paper: {throughput: speed, mfu: mfu, memory: memory}");
  const auto load = [&](const std::string& text) { return LoadScenario(folder.Write("paper.yaml", text)); };
  const auto scenario = load(good);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  EXPECT_EQ(scenario->report, Scenario::Report::kMeshAttentionPaper);
  ASSERT_EQ(scenario->throughput.size(), 1u);
  ASSERT_EQ(scenario->mfu.size(), 1u);
  ASSERT_EQ(scenario->memory.size(), 1u);
  EXPECT_EQ(scenario->throughput[0].ring, 1);
  EXPECT_EQ(scenario->mfu[0].ring, 2);
  EXPECT_EQ(scenario->memory[0].ring, 3);
  EXPECT_EQ(scenario->cluster.gpus_per_node, 4);
  for (const auto& [table, key] : {std::pair("mfu: mfu, ", "paper.mfu: is missing"),
                                   std::pair(", memory: memory", "paper.memory: is missing")}) {
    const absl::Status refused = load(Replaced(good, table, "")).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr(key));
  }
  const absl::Status missing = load(Replaced(good, "mfu: mfu", "mfu: none")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), testing::HasSubstr(":10: paper.mfu: "));
}

// What is fitted is not given, too.
TEST(Scenario, FitsAClusterToATable) {
  std::string good =
      "cluster:\n  gpus_per_node: 4\n  same_node: {flow_bytes_per_second: 100e9}\n  fitted_to: " +
      ScenarioPath("mesh_attention_table3_throughput.csv") + "\n" +
      std::string(kGood).substr(std::string(kGood).find("attention: {"));
  const auto scenario = LoadText(good);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  EXPECT_EQ(scenario->cluster.gpus_per_node, 4);
  EXPECT_EQ(scenario->cluster.same_node.bytes_per_second, 100e9);
  EXPECT_GT(scenario->cluster.attention_flops_per_second, 0);
  for (const char* given :
       {"between_nodes: {latency: 1us}", "node_bytes_per_second: 1", "attention_flops_per_second: 1"}) {
    const absl::Status refused =
        LoadText(Replaced(good, "gpus_per_node: 4", std::string("gpus_per_node: 4\n  ") + given)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                testing::HasSubstr("cluster.fitted_to: leave out between_nodes"));
  }
}

struct BadScenario {
  const char* from;
  const char* to;
  const char* named;
};

void ExpectRefused(const char* good, std::span<const BadScenario> cases) {
  for (const auto& [from, to, named] : cases) {
    const auto scenario = LoadText(Replaced(good, from, to));
    EXPECT_EQ(scenario.status().code(), absl::StatusCode::kInvalidArgument) << to;
    EXPECT_NE(scenario.status().message().find(named), std::string::npos) << scenario.status();
  }
}

TEST(Scenario, RefusesWhatItCannotRunByNameAndLine) {
  const BadScenario kCases[] = {
      {"strategies:", "stratgies:", ":10: stratgies"},
      {"gpus_per_node: 4", "gpus_per_nod: 4", ":3: cluster.gpus_per_nod"},
      {"gpus_per_node: 4", "gpus_per_node: 0", "gpus_per_node"},
      {"20e9", "-1", "shared bandwidth"},
      {"100e9", "0", "same_node"},
      {"100e12", "0", "attention"},
      {"10us", "10", ":5: cluster.between_nodes.latency"},
      {"kv_heads: 2", "kv_heads: 3", "KV heads"},
      {"tokens: 65536", "tokens: 0", "attention"},
      {"tokens: 65536", "tokens: 4000000000", "attention"},
      {"head_dim: 64", "head_dim: 64, mask: none", "attention.mask"},
      {"head_dim: 64", "head_dim: 64, dtype: fp8", "attention.dtype"},
      {"gpus: 4, 8", "gpus: 4, none", ":9: gpus"},
      {"gpus: 4, 8", "gpus: 4097", ":9: gpus"},
      {"gpus: 4, 8", "gpus: 4, 0", ":9: gpus"},
      {"tokens: 65536", "tokens: 2147483648", "attention: too large"},
      {"q_heads: 8", "q_heads: 65537", "attention: too large"},
      {"kv_heads: 2", "kv_heads: 65537", "attention: too large"},
      {"head_dim: 64", "head_dim: 65537", "attention: too large"},
      {"tokens: 65536, q_heads: 8, kv_heads: 2, head_dim: 64",
       "tokens: 2147483647, q_heads: 65536, kv_heads: 65536, head_dim: 65536", "lower the tokens, the heads"},
      {"gpus: 4, 8", "gpus: \"\"", "gpus"},
      {"ring, usp", "ring, rung", ":10: strategies"},
      {"gpus: 4, 8", "gpus: 4\npasses: twice", "passes"},
      {"gpus: 4, 8", "gpus: 4\nreport: all", "report"},
      {"gpus: 4, 8", "report: mesh_attention_paper", "paper.throughput"},
      {"  gpus_per_node: 4", "  fitted_to: none.csv", "cluster.fitted_to"},
  };
  ExpectRefused(kGood, kCases);
  EXPECT_EQ(LoadScenario("/nowhere.yaml").status().code(), absl::StatusCode::kNotFound);
}

TEST(GpuCluster, IsTheClusterAndWhatAGpuDoes) {
  const std::string good = Replaced(kGood, "attention_flops_per_second: 100e12",
                                    "attention_flops_per_second: 100e12\n  gemm_flops_per_second: 150e12\n  "
                                    "memory_bytes_per_second: 2e12\n  memory_bytes: 80GB");
  const std::string path = testing::TempDir() + "/gpus.yaml";
  const auto load = [&](const std::string& text) {
    std::ofstream(path) << text;
    return LoadGpuCluster(path);
  };
  const auto gpus = load(good);
  ASSERT_TRUE(gpus.ok()) << gpus.status();
  EXPECT_EQ(gpus->cluster.gpus_per_node, 4);
  EXPECT_DOUBLE_EQ(gpus->cluster.attention_flops_per_second, 100e12);
  EXPECT_DOUBLE_EQ(gpus->gemm_flops_per_second, 150e12);
  EXPECT_DOUBLE_EQ(gpus->memory_bytes_per_second, 2e12);
  EXPECT_EQ(gpus->memory_bytes, 80'000'000'000);
  EXPECT_EQ(gpus->host_bytes_per_second, 0);
  EXPECT_EQ(gpus->experts_gemm_share, 1);
  EXPECT_EQ(gpus->host_memory_bytes, 0);
  const auto more = load(Replaced(good, "80GB", "80GB\n  experts_gemm_share: 0.3\n  host_memory_bytes: 2TB"));
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(more->experts_gemm_share, 0.3);
  EXPECT_EQ(more->host_memory_bytes, 2'000'000'000'000);
  EXPECT_TRUE(load(Replaced(good, "80GB", "80GB\n  experts_gemm_share: 1")).ok());
  EXPECT_EQ(load(Replaced(good, "80GB", "80GB\n  host_bytes_per_second: 5e9"))->host_bytes_per_second, 5e9);
  EXPECT_TRUE(LoadGpuCluster(ScenarioPath("h100_nodes.yaml")).ok());
  const BadScenario kCases[] = {
      {"150e12", "0", ":8: cluster.gemm_flops_per_second: is missing, or not above 0"},
      {"150e12", "nan", "cluster.gemm_flops_per_second"},
      {"2e12", "-1", ":9: cluster.memory_bytes_per_second"},
      {"2e12", "inf", ":9: cluster.memory_bytes_per_second"},
      {"80GB", "80GB\n  host_bytes_per_second: inf", ":11: cluster.host_bytes_per_second"},
      {"  memory_bytes: 80GB", "", "cluster.memory_bytes: is missing"},
      {"80GB", "80", "memory_bytes"},
      {"80GB", "80GB\n  host_bytes_per_second: -1", ":11: cluster.host_bytes_per_second: must be"},
      {"80GB", "80GB\n  experts_gemm_share: 0", ":11: cluster.experts_gemm_share: must be above 0"},
      {"80GB", "80GB\n  experts_gemm_share: -0.5", "cluster.experts_gemm_share"},
      {"80GB", "80GB\n  experts_gemm_share: 1.01", "cluster.experts_gemm_share"},
      {"80GB", "80GB\n  experts_gemm_share: nan", "cluster.experts_gemm_share"},
      {"80GB", "80GB\n  host_memory_bytes: 2000", "host_memory_bytes"},
      {"80GB", "80GB\n  host_memory_bytes: -1GB", "host_memory_bytes"},
      {"100e12", "0", "attention"},
  };
  for (const auto& [from, to, named] : kCases) {
    const auto refused = load(Replaced(good, from, to));
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << to;
    EXPECT_NE(refused.status().message().find(named), std::string::npos) << refused.status();
  }
  EXPECT_EQ(LoadGpuCluster("/nowhere.yaml").status().code(), absl::StatusCode::kNotFound);
}

constexpr char kSweep[] = R"(
report: sweep
sweep:
  clusters:
    near:
      gpus_per_node: 4
      same_node: {latency: 5us, flow_bytes_per_second: 100e9}
      between_nodes: {latency: 10us, flow_bytes_per_second: 100e9}
      attention_flops_per_second: 100e12
    far:
      gpus_per_node: 4
      same_node: {latency: 5us, flow_bytes_per_second: 100e9}
      between_nodes: {latency: 10us, flow_bytes_per_second: 1e9}
      attention_flops_per_second: 100e12
  heads: 8/2, 4/4
  tokens: 65536, 8192
attention: {head_dim: 64}
gpus: 4, 8
strategies: ring, usp, loongtrain
passes: forward_backward
)";

TEST(Scenario, ReadsASweep) {
  const auto scenario = LoadText(kSweep);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  ASSERT_EQ(scenario->sweep.clusters.size(), 2u);
  EXPECT_EQ(scenario->sweep.clusters[0].name, "far");  // by name
  EXPECT_DOUBLE_EQ(scenario->sweep.clusters[0].cluster.between_nodes.bytes_per_second, 1e9);
  ASSERT_EQ(scenario->sweep.jobs.size(), 4u);
  EXPECT_EQ(scenario->sweep.jobs[1].tokens, 8192);
  EXPECT_EQ(scenario->sweep.jobs[1].kv_heads, 2);
  EXPECT_EQ(scenario->sweep.jobs[2].q_heads, 4);
  EXPECT_EQ(scenario->sweep.passes.size(), 2u);
  const BadScenario kCases[] = {
      {"8/2, 4/4", "8/2, 4", ":15: sweep.heads"},
      {"8/2, 4/4", "8/3", "KV heads"},
      {"8/2, 4/4", "\"\"", "sweep: heads and tokens"},
      {"65536, 8192", "many", ":16: sweep.tokens"},
      {"65536, 8192", "0", "attention"},
      {"8/2, 4/4", "8/2/1", ":15: sweep.heads"},
      {"8/2, 4/4", "many/2", ":15: sweep.heads"},
      {"8/2, 4/4", "8/few", ":15: sweep.heads"},
      {"tokens: 65536, 8192", "tokens: \"\"", "sweep: heads and tokens"},
      {"attention: {head_dim: 64}", "attention: {head_dim: 64, tokens: 9}", ":17: attention"},
      {"attention: {head_dim: 64}", "attention: {head_dim: 64, q_heads: 9}", ":17: attention"},
      {"attention: {head_dim: 64}", "attention: {head_dim: 64, kv_heads: 9}", ":17: attention"},
      {"gpus: 4, 8", "gpus: 0", "gpus"},
      {"gpus: 4, 8", "cluster: {gpus_per_node: 4}", "sweep.clusters"},
      {"flow_bytes_per_second: 1e9", "flow_bytes_per_second: 0", ":10: sweep.clusters.far"},
      {"flow_bytes_per_second: 1e9", "flow: 1e9", ":13: sweep.clusters.far.between_nodes.flow"},
      {"report: sweep", "report: sweep\ncluster: {gpus_per_node: 4}", "sweep.clusters"},
  };
  ExpectRefused(kSweep, kCases);
}

TEST(Simulation, PrintsASweepAsTextAndJson) {
  const auto scenario = LoadText(kSweep);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  const auto report = RunScenario(*scenario);
  ASSERT_TRUE(report.ok()) << report.status();
  const auto json =
      nlohmann::json::parse(SimulationJson(*scenario, *report), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object());
  const auto& sweep = json["sweep"];
  ASSERT_EQ(sweep["cells"].size(), 2u * 4 * 2 * 2);
  EXPECT_EQ(sweep["clusters"].size(), 2u);
  const std::string text = SimulationText(*scenario, *report);
  for (const auto& cell : sweep["cells"]) {
    for (const char* run : {"planned", "rival"}) {
      char milliseconds[32];
      std::snprintf(milliseconds, sizeof milliseconds, "%.4g", cell[run]["seconds"].get<double>() * 1e3);
      EXPECT_NE(text.find(milliseconds), std::string::npos) << milliseconds << "\n" << text;
      EXPECT_NE(text.find(cell[run]["settings"].get<std::string>()), std::string::npos);
    }
  }
  const std::string summary = "in " + std::to_string(sweep["slower"].get<int>()) + " of 32 cells";
  EXPECT_NE(text.find(summary), std::string::npos) << text;
}

// A few cells of the committed sweep, and what docs/simulation.md says of them.
TEST(Simulation, CellsOfTheForwardSweep) {
  auto scenario = LoadScenario(ScenarioPath("forward_sweep.yaml"));
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  sim::Sweep& sweep = scenario->sweep;
  EXPECT_EQ(sweep.clusters.size() * sweep.jobs.size() * sweep.gpus.size() * sweep.passes.size(), 350u);
  std::erase_if(sweep.jobs, [](const sim::AttentionJob& job) { return job.q_heads > 32; });
  sweep.gpus = {16, 64};
  std::erase_if(scenario->strategies, [](sim::StrategyKind kind) {
    return kind != sim::StrategyKind::kUsp && kind != sim::StrategyKind::kLoongTrain;
  });
  const auto report = RunScenario(*scenario);
  ASSERT_TRUE(report.ok()) << report.status();
  const sim::SweepSummary summary = sim::SummaryOf(report->sweep);
  EXPECT_EQ(summary.cells, 80);
  EXPECT_LE(summary.slower, 2);
  EXPECT_LE(summary.most, 1.045);
  EXPECT_GE(summary.over_head_rings.value(), 1.008);
}

TEST(Scenario, TheCommittedOnesLoad) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(ScenarioPath(""))) {
    if (entry.path().extension() != ".yaml") continue;
    const auto scenario = LoadScenario(entry.path().string());
    EXPECT_TRUE(scenario.ok()) << scenario.status();
    ++files;
  }
  EXPECT_GE(files, 7);
}

// A fitted cluster's messages start inside a node as between nodes, where the scenario does not say
// otherwise.
TEST(Scenario, StartInsideANodeOfAFittedCluster) {
  const auto slow = LoadScenario(ScenarioPath("paper_cluster.yaml"));
  const auto fast = LoadScenario(ScenarioPath("paper_cluster_fast_nodes.yaml"));
  ASSERT_TRUE(slow.ok() && fast.ok()) << slow.status() << fast.status();
  EXPECT_EQ(slow->cluster.same_node.latency_seconds, slow->cluster.between_nodes.latency_seconds);
  EXPECT_EQ(fast->cluster.same_node.latency_seconds, 1e-4);
  EXPECT_GT(fast->cluster.between_nodes.latency_seconds, 1e-3);
}

TEST(Simulation, PlannerIsNoSlowerThanItsRivalsOnH100Nodes) {
  auto scenario = LoadScenario(ScenarioPath("h100_nodes.yaml"));
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  scenario->gpus = {16, 64, 256};
  const auto report = RunScenario(*scenario);
  ASSERT_TRUE(report.ok()) << report.status();
  for (const Comparison& comparison : report->comparisons) {
    const sim::StrategyResult* planned = comparison.Find(sim::StrategyKind::kPlanned);
    ASSERT_NE(planned, nullptr);
    EXPECT_LE(planned->seconds(), comparison.FastestRivalSeconds() * 1.001) << comparison.gpus << " GPUs";
  }
}

TEST(Simulation, PrintsTheSameFiguresAsTextAndJson) {
  const auto scenario = LoadText(kGood);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  const auto report = RunScenario(*scenario);
  ASSERT_TRUE(report.ok()) << report.status();
  const auto json =
      nlohmann::json::parse(SimulationJson(*scenario, *report), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object());
  ASSERT_EQ(json["comparisons"].size(), 2u);
  const std::string text = SimulationText(*scenario, *report);
  for (const auto& comparison : json["comparisons"]) {
    for (const auto& [name, result] : comparison["strategies"].items()) {
      EXPECT_NE(text.find(name), std::string::npos) << name;
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%.4g", result["seconds"].get<double>());
      EXPECT_NE(text.find(seconds), std::string::npos) << name << " " << seconds << "\n" << text;
    }
  }
}

TEST(Simulation, SaysInHowManySizesThePlanIsSlowerAndByHowMuch) {
  const auto scenario = LoadText(kGood);
  ASSERT_TRUE(scenario.ok()) << scenario.status();
  auto report = RunScenario(*scenario);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->comparisons.size(), 2u);
  const auto takes = [&](size_t index, double of_fastest_rival) {
    Comparison& comparison = report->comparisons[index];
    const double fastest = comparison.FastestRivalSeconds();
    for (sim::StrategyResult& result : comparison.results) {
      if (result.kind != sim::StrategyKind::kPlanned) continue;
      for (auto& pass : result.passes) {
        pass.seconds = fastest * of_fastest_rival / static_cast<double>(result.passes.size());
      }
    }
  };
  const auto text = [&] { return SimulationText(*scenario, *report); };
  takes(0, 0.5);
  takes(1, 0.5);
  EXPECT_THAT(text(),
              testing::HasSubstr("planned: never slower than the fastest rival, in 2 sizes; the rival takes "
                                 "2.000 times as long in the geometric mean\n"));
  takes(1, 1.02);
  EXPECT_THAT(text(),
              testing::HasSubstr("planned: slower than the fastest rival in 1 of 2 sizes, by 2 % at most; "));
  takes(0, 1.001);
  EXPECT_THAT(text(),
              testing::HasSubstr("planned: slower than the fastest rival in 2 of 2 sizes, by 2 % at most; "));
}

}  // namespace
}  // namespace meshfill
