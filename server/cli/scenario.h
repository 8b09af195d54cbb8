// What `meshfill simulate` runs: YAML in, clusters and jobs of the simulator out.
//
// The schema, its defaults and its ranges stand in proto/meshfill/v1/scenario.proto.
#ifndef MESHFILL_SERVER_CLI_SCENARIO_H_
#define MESHFILL_SERVER_CLI_SCENARIO_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/cluster.h"
#include "engine/sim/paper_tables.h"
#include "engine/sim/strategies.h"
#include "engine/sim/sweep.h"

namespace meshfill {

struct Scenario {
  enum class Report { kStrategies, kMeshAttentionPaper, kSweep };

  Report report = Report::kStrategies;
  sim::Cluster cluster;  // of no sweep
  std::vector<sim::StrategyKind> strategies;

  // For kStrategies.
  sim::AttentionJob job;
  std::vector<int> gpus;
  std::vector<sim::Pass> passes;

  // For kSweep.
  sim::Sweep sweep;

  // For kMeshAttentionPaper.
  std::vector<sim::PaperCell> throughput;
  std::vector<sim::PaperCell> mfu;
  std::vector<sim::PaperCell> memory;
};

// NOT_FOUND: no such file, or a table that it names. INVALID_ARGUMENT, in one line with the file and where
// possible the line and the key: what is wrong and what to do.
absl::StatusOr<Scenario> LoadScenario(const std::string& path);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_SCENARIO_H_
