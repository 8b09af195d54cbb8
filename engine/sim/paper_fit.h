// A cluster fitted to the paper's Table 3.
//
// Compute rate, flow bandwidth and latency come from the Ring columns alone: the least rms of the relative
// errors of its 24 times. The bandwidth that a node's flows share does not show in Ring, where one flow
// leaves a node and one enters; it is fitted on the Mesh columns, one number to 24, by the least mean of the
// absolute relative errors. What Table 3 cannot tell is given: GPUs in a node, and the bandwidth and the
// start of a message inside it.
#ifndef MESHFILL_ENGINE_SIM_PAPER_FIT_H_
#define MESHFILL_ENGINE_SIM_PAPER_FIT_H_

#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "engine/sim/cluster.h"
#include "engine/sim/paper_tables.h"

namespace meshfill::sim {

struct FitAssumptions {
  int gpus_per_node = 8;
  double same_node_bytes_per_second = 100e9;
  std::optional<double> same_node_latency_seconds;  // none: as between nodes
};

// INVALID_ARGUMENT: no cells, or assumptions that CheckCluster refuses.
absl::StatusOr<Cluster> FitPaperCluster(std::span<const PaperCell> throughput,
                                        const FitAssumptions& assumptions);

// `cluster` without topology: every pair of GPUs has the link between nodes, and no flows share.
Cluster Flat(const Cluster& cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_PAPER_FIT_H_
