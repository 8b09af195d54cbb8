// A simulated cluster: nodes of GPUs, two classes of links, and how fast a GPU computes attention.
//
//     node:  GPU GPU … GPU      same_node: any two GPUs of a node. A GPU's flows out share its port, and so
//              \  |    /        do its flows in.
//            shared link        between_nodes: a flow runs at most at its own bandwidth. The flows out of a
//                 |             node share node_bytes_per_second, and so do the flows into it.
//             the network
//
// GPU g is in node g / gpus_per_node.
#ifndef MESHFILL_ENGINE_SIM_CLUSTER_H_
#define MESHFILL_ENGINE_SIM_CLUSTER_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "engine/mesh/topology.h"

namespace meshfill::sim {

inline constexpr int kMaxGpus = 4096;  // most that are simulated

// What makes ranks differ; drawn once per run from the seed.
struct Variation {
  double straggler_share = 0;     // fraction of the ranks that compute slower, 0 to 1
  double straggler_slowdown = 1;  // how many times slower; ≥ 1
  double jitter = 0;              // each block takes 1 + jitter·|N(0, 1)| times as long
  uint64_t seed = 1;
};

struct Cluster {
  static constexpr double kUnshared = std::numeric_limits<double>::infinity();

  int gpus_per_node = 8;
  Link same_node;  // one message at a time from one GPU to another; its first byte flows after the latency
  Link between_nodes;
  double node_bytes_per_second = kUnshared;  // all flows out of a node together, and again all into it
  double attention_flops_per_second = 0;     // one GPU's speed in attention blocks; masked pairs do not count
  double block_overhead_seconds = 0;         // launch of one block
  Variation variation;
};

// The first `gpus` of the cluster as the planner knows them: GPU g is seat g.
Topology TopologyOf(const Cluster& cluster, int gpus);

// `cluster` with messages one at a time: no flow shares a node's link.
Cluster WithoutSharing(Cluster cluster);

// INVALID_ARGUMENT naming the field that is not positive or out of its range.
absl::Status CheckCluster(const Cluster& cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_CLUSTER_H_
