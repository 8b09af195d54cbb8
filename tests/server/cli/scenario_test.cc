#include "server/cli/scenario.h"

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/cli/simulation_report.h"

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

TEST(Scenario, RefusesWhatItCannotRunByNameAndLine) {
  const struct {
    const char* from;
    const char* to;
    const char* named;
  } kCases[] = {
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
      {"gpus: 4, 8", "gpus: 5000", ":9: gpus"},
      {"gpus: 4, 8", "gpus: \"\"", "gpus"},
      {"ring, usp", "ring, rung", ":10: strategies"},
      {"gpus: 4, 8", "gpus: 4\npasses: twice", "passes"},
      {"gpus: 4, 8", "gpus: 4\nreport: all", "report"},
      {"gpus: 4, 8", "report: mesh_attention_paper", "paper.throughput"},
      {"  gpus_per_node: 4", "  fitted_to: none.csv", "cluster.fitted_to"},
  };
  for (const auto& [from, to, named] : kCases) {
    const auto scenario = LoadText(Replaced(kGood, from, to));
    EXPECT_EQ(scenario.status().code(), absl::StatusCode::kInvalidArgument) << to;
    EXPECT_NE(scenario.status().message().find(named), std::string::npos) << scenario.status();
  }
  EXPECT_EQ(LoadScenario("/nowhere.yaml").status().code(), absl::StatusCode::kNotFound);
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
    EXPECT_LE(planned->seconds(), comparison.FastestRival()->seconds() * 1.001) << comparison.gpus << " GPUs";
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

}  // namespace
}  // namespace meshfill
