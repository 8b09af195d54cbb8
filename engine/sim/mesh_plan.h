// Mesh-Attention for one pass on a simulated cluster: tile, head groups and placement chosen, the schedule
// derived.
#ifndef MESHFILL_ENGINE_SIM_MESH_PLAN_H_
#define MESHFILL_ENGINE_SIM_MESH_PLAN_H_

#include <string>

#include "engine/mesh/mesh.h"
#include "engine/mesh/placement.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/cluster.h"
#include "engine/sim/mesh_program.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

// What Algorithms 2 and 3 take the transfers to cost (Mesh-Attention §3.5: c is profiled).
enum class Profile {
  kShared,    // measured with all ranks sending at once, as they will
  kIsolated,  // measured with one message on an idle cluster
};

enum class Scheduling {
  kGreedy,        // Algorithms 2 and 3
  kLeastTime,     // OptimalSchedule; forward only
  kRowsFirst,     // BackwardOrder; backward only
  kColumnsFirst,  // likewise
};

struct MeshPlan {
  int heads = 1;
  Tile tile;
  Placement placement;
  Scheduling scheduling = Scheduling::kGreedy;

  std::string DebugString() const;  // "2·4x32, box 2x1x4, least time"; "4x64" row-first and greedy
};

// The plan's schedule as a program. CheckHeadGroups has passed.
RankProgram MeshProgram(const AttentionJob& job, Pass pass, const MeshPlan& plan, const Cluster& cluster,
                        Profile profile = Profile::kShared, Buffers buffers = Buffers::kRelease);

// The paper's choice (Figure 6, row-first ranks, one head group): every a·b = ranks is scheduled with
// isolated profiles, its time estimated from them, and the smallest taken. That the profiles are isolated is
// our reading; it explains the shapes that the memory in Table 5 implies, and that Mesh gains less than the
// estimate says.
MeshPlan PaperMeshPlan(const AttentionJob& job, Pass pass, int ranks, const Cluster& cluster);

// `cluster` as an isolated profile sees it: no flow shares a link.
Cluster WithoutSharing(Cluster cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_MESH_PLAN_H_
