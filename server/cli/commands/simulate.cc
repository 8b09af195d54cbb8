#include "server/cli/commands/simulate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/sim/simulator.h"
#include "kernels/return_if_error.h"
#include "server/cli/commands/flags.h"
#include "server/cli/output_file.h"
#include "server/cli/scenario.h"
#include "server/cli/simulation_report.h"
#include "server/pictures/simulation_picture.h"

namespace meshfill {
namespace {

// The strategy's name for people; StrategyName is its name in scenarios and JSON.
const char* StrategyTitle(sim::StrategyKind kind) {
  switch (kind) {
    case sim::StrategyKind::kRing:
      return "Ring Attention";
    case sim::StrategyKind::kPassQ:
      return "Ring of queries";
    case sim::StrategyKind::kPaperMesh:
      return "Mesh-Attention (paper)";
    case sim::StrategyKind::kUlysses:
      return "Ulysses";
    case sim::StrategyKind::kUsp:
      return "USP";
    case sim::StrategyKind::kBurst:
      return "BurstAttention";
    case sim::StrategyKind::kLoongTrain:
      return "LoongTrain";
    case sim::StrategyKind::kStarTrail:
      return "StarTrail";
    case sim::StrategyKind::kTwoWayRing:
      return "Two-way ring";
    case sim::StrategyKind::kAllGather:
      return "All-gather KV";
    case sim::StrategyKind::kAttention2d:
      return "Attention2D";
    case sim::StrategyKind::kTasp:
      return "TASP";
    case sim::StrategyKind::kTensorParallel:
      return "Tensor × context parallelism";
    case sim::StrategyKind::kPlanned:
      return "Meshfill's plan";
    case sim::StrategyKind::kPlannedLanes:
      return "The same, two lanes";
  }
  return "?";
}

std::string LinkText(const Link& link) {
  return absl::StrFormat("%.4g GB/s and %.4g µs", link.bytes_per_second / 1e9, link.latency_seconds * 1e6);
}

// "nodes of 8 GPUs, 180 TFLOP/s each; in a node …".
std::string ClusterText(const sim::Cluster& cluster) {
  const std::string node =
      std::isinf(cluster.node_bytes_per_second)
          ? ""
          : absl::StrFormat(", %.4g GB/s out of a node", cluster.node_bytes_per_second / 1e9);
  return absl::StrFormat(
      "Nodes of %d GPUs, %.4g TFLOP/s of attention each. A flow in a node: %s. Between nodes: %s%s.",
      cluster.gpus_per_node, cluster.attention_flops_per_second / 1e12, LinkText(cluster.same_node),
      LinkText(cluster.between_nodes), node);
}

class SimulateCommand : public Command {
 public:
  explicit SimulateCommand(CLI::App& parent)
      : Command(parent.add_subcommand("simulate", "Simulate attention on a cluster, strategy by strategy")) {
    app_->add_option("--scenario", scenario_, "Scenario, e.g. configs/scenarios/h100_nodes.yaml")
        ->type_name("F")
        ->required();
    AddJsonFlag(*app_, json_);
    app_->add_option("--svg", svg_path_,
                     "Draw the strategies' timelines, on the most GPUs up to 64 of the scenario")
        ->type_name("FILE");
  }

  absl::Status Run() override {
    if (!svg_path_.empty()) {
      RETURN_IF_ERROR(CheckOutputPath(svg_path_));
    }
    ASSIGN_OR_RETURN(const Scenario scenario, LoadScenario(scenario_));
    ASSIGN_OR_RETURN(const SimulationReport report, RunScenario(scenario));
    if (!svg_path_.empty()) {
      RETURN_IF_ERROR(Draw(report));
    }
    const std::string text =
        json_ ? absl::StrCat(SimulationJson(scenario, report), "\n") : SimulationText(scenario, report);
    std::fputs(text.c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  // The most GPUs whose steps are still wide enough to see, else the fewest; the first of equals.
  static std::vector<Comparison>::const_iterator Drawn(const std::vector<Comparison>& comparisons) {
    constexpr int kMostGpus = 64;
    return std::max_element(comparisons.begin(), comparisons.end(),
                            [](const Comparison& a, const Comparison& b) {
                              const auto rank = [](int gpus) { return gpus <= kMostGpus ? gpus : -gpus; };
                              return rank(a.gpus) < rank(b.gpus);
                            });
  }

  // The first pass of every strategy that applies.
  absl::Status Draw(const SimulationReport& report) const {
    if (report.comparisons.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(scenario_, ": compares no strategies; there is nothing to draw"));
    }
    const Comparison& comparison = *Drawn(report.comparisons);
    std::vector<SimulatedStrategy> strategies;
    for (const sim::StrategyResult& result : comparison.results) {
      if (result.passes.empty()) continue;
      const sim::PassResult& pass = result.passes.front();
      ASSIGN_OR_RETURN(sim::Simulation simulation, sim::Simulate(pass.program, pass.placement, report.cluster,
                                                                 sim::Recording::kTimeline));
      strategies.push_back({.name = StrategyTitle(result.kind),
                            .settings = pass.settings,
                            .timeline = std::move(simulation.timeline)});
    }
    const std::string title = absl::StrCat("Simulated attention of ", comparison.job.tokens, " tokens on ",
                                           comparison.gpus, " GPUs: one layer");
    return WriteTextFile(svg_path_, SimulationSvg(title, ClusterText(report.cluster), std::move(strategies)));
  }

  std::string scenario_;
  bool json_ = false;
  std::string svg_path_;
};

}  // namespace

std::unique_ptr<Command> AddSimulateCommand(CLI::App& parent) {
  return std::make_unique<SimulateCommand>(parent);
}

}  // namespace meshfill
