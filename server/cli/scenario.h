// What `meshfill simulate` runs, and on what `meshfill plan --cluster` plans: YAML in, clusters and jobs out.
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
  sim::Cluster cluster;  // unused by a sweep
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

// GPUs that need not be here.
struct GpuCluster {
  sim::Cluster cluster;              // its variation counts for nothing
  double gemm_flops_per_second = 0;  // one GPU's speed, as all of these
  double memory_bytes_per_second = 0;
  double host_bytes_per_second = 0;  // 0: weights cannot stream
  int64_t memory_bytes = 0;
  double experts_gemm_share = 1;  // speed of experts' products, of gemm_flops_per_second
  int64_t host_memory_bytes = 0;  // of a node's host; 0: not bounded
};

// The cluster of a scenario that has these keys, too. Errors as below.
absl::StatusOr<GpuCluster> LoadGpuCluster(const std::string& path);

// NOT_FOUND: no such file, or a table that it names. INVALID_ARGUMENT, in one line with the file and where
// possible the line and the key: what is wrong and what to do.
absl::StatusOr<Scenario> LoadScenario(const std::string& path);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_SCENARIO_H_
