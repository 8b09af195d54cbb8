// Runs a program on a cluster as discrete events under virtual time.
//
// Each rank works through its actions by itself; ranks meet only through messages. A message leaves when its
// sender starts it (and the one before it on the same channel has arrived), waits for its link's latency, and
// arrives when its bytes have crossed the network. Deterministic: the same program, cluster and seed give the
// same result.
#ifndef MESHFILL_ENGINE_SIM_SIMULATOR_H_
#define MESHFILL_ENGINE_SIM_SIMULATOR_H_

#include <array>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/mesh/placement.h"
#include "engine/schedule/timeline.h"
#include "engine/sim/cluster.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

struct RankTimes {
  double compute_seconds = 0;
  PerTraffic<double> wait_seconds;  // exposed communication
  double total_seconds = 0;         // until the rank's last action
};

struct Simulation {
  double seconds = 0;            // until the last rank has ended
  std::vector<RankTimes> ranks;  // by rank
  // Only if asked for. A transfer is its sender's, while the message is under way; waits and transfers are
  // named by OperationName.
  Timeline timeline;
};

enum class Recording { kNone, kTimeline };

// INVALID_ARGUMENT: a cluster that CheckCluster refuses, or a placement for another number of ranks.
// INTERNAL: a program in which ranks wait for each other for ever.
absl::StatusOr<Simulation> Simulate(const RankProgram& program, const Placement& placement,
                                    const Cluster& cluster, Recording recording = Recording::kNone);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_SIMULATOR_H_
