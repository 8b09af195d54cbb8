// Mesh-Attention on a simulated cluster, by Meshfill's own planner and cost model (engine/plan).
//
// The planner is told of one layer that is attention alone: what else a prefill does takes no time. It serves
// prefill and knows no backward pass; the costs of that one's messages come from the same links.
#ifndef MESHFILL_ENGINE_SIM_PLACED_MESH_H_
#define MESHFILL_ENGINE_SIM_PLACED_MESH_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/placement.h"
#include "engine/plan/plan.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/backward_schedule.h"
#include "engine/sim/cluster.h"
#include "engine/sim/mesh_program.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

// Head groups, each of a mesh, and where their ranks sit.
struct PlacedMesh {
  int heads = 1;
  Tile tile;
  Placement placement;
  int kv_inner = 0;  // as in mesh.h

  std::string DebugString() const;  // "2·4x32, box 2x1x4"; "4x64" row-first; "1x64, KV rings of 8"
};

// What Algorithms 2 and 3 take the transfers to cost (Mesh-Attention §3.5: c is profiled).
enum class Profile {
  kShared,    // measured with all ranks sending at once, as they will
  kIsolated,  // measured with one message on an idle cluster
};

// The mesh with Algorithm 2's schedule, or Algorithm 3's with blocks in `order`. CheckJob, CheckCluster and
// CheckHeadGroups have passed.
RankProgram MeshProgram(const AttentionJob& job, Pass pass, const PlacedMesh& mesh, const Cluster& cluster,
                        Profile profile = Profile::kShared, Buffers buffers = Buffers::kRelease,
                        BackwardOrder order = BackwardOrder::kAlternate);

// The plan of the forward pass. CheckJob and CheckCluster have passed.
absl::StatusOr<Plan> MakeForwardPlan(const AttentionJob& job, int ranks, const Cluster& cluster);

// The paper's choice (Figure 6, row-first ranks, one head group): every a·b = ranks is scheduled with
// isolated profiles, its time estimated from them, and the smallest taken. That the profiles are isolated is
// our reading; it explains the shapes that the memory in Table 5 implies, and that Mesh gains less than the
// estimate says.
PlacedMesh PaperMesh(const AttentionJob& job, Pass pass, int ranks, const Cluster& cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_PLACED_MESH_H_
