// What `meshfill simulate` prints: runs a scenario, and writes its tables for a person or as JSON.
#ifndef MESHFILL_SERVER_CLI_SIMULATION_REPORT_H_
#define MESHFILL_SERVER_CLI_SIMULATION_REPORT_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sim/paper_reproduction.h"
#include "engine/sim/strategies.h"
#include "engine/sim/sweep.h"
#include "server/cli/scenario.h"

namespace meshfill {

// Every strategy on one number of GPUs.
struct Comparison {
  sim::AttentionJob job;
  int gpus = 0;
  std::vector<sim::StrategyResult> results;  // in the scenario's order

  // Null where the scenario does not ask for it, or it does not apply.
  const sim::StrategyResult* Find(sim::StrategyKind kind) const;
  // Seconds of the fastest rival in one pass, or in all (nullopt). Infinite where no rival (sim::IsRival)
  // applies.
  double FastestRivalSeconds(std::optional<size_t> pass = std::nullopt) const;
};

struct SimulationReport {
  sim::Cluster cluster;                 // unused by a sweep
  std::vector<Comparison> comparisons;  // by GPUs, or by cell of the paper
  std::vector<sim::SweepResult> sweep;  // for Scenario::Report::kSweep, in its cells' order

  // For Scenario::Report::kMeshAttentionPaper.
  sim::ThroughputTable throughput;
  sim::ThroughputTable flat_throughput;  // the same cluster without topology
  sim::UtilisationTable utilisation;
  std::vector<sim::MemoryRow> memory;
};

absl::StatusOr<SimulationReport> RunScenario(const Scenario& scenario);

std::string SimulationText(const Scenario& scenario, const SimulationReport& report);
std::string SimulationJson(const Scenario& scenario,
                           const SimulationReport& report);  // one object, no newline

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_SIMULATION_REPORT_H_
