// A quick estimate of a program: all ranks in lockstep, each message as slow as the slowest of its channel
// when all ranks send at once. Exact where ranks do not drift apart; thousands of times faster than the
// simulation.
#ifndef MESHFILL_ENGINE_SIM_LOCKSTEP_H_
#define MESHFILL_ENGINE_SIM_LOCKSTEP_H_

#include <vector>

#include "engine/mesh/placement.h"
#include "engine/sim/cluster.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

// The links of a channel that all ranks use at once.
struct ChannelSpeed {
  double same_node_bytes_per_second = 0;      // 0: no message inside a node
  double between_nodes_bytes_per_second = 0;  // the slowest flow between nodes; 0: there is none
  double port_bytes_per_second = 0;           // such a flow's share of its node's port

  double Seconds(const Cluster& cluster, double bytes) const;
};
ChannelSpeed SpeedOf(const std::vector<int>& from, const Placement& placement, const Cluster& cluster);

double LockstepSeconds(const RankProgram& program, const Placement& placement, const Cluster& cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_LOCKSTEP_H_
