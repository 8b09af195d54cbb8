// Mesh-Attention with two communications under way at once, one along each ring: what the paper leaves as
// future work. Forward, plans may have them too (multi_ring_schedule.h); backward, the simulator shows what
// they would be worth.
//
//     Q lane    [Recv Q#1][Recv Q#2]      …     [Send O#1]   [Send O#2]         inside a node, say
//     KV lane   [Recv KV#1     ][Recv KV#2     ][Recv KV#3     ]                 between nodes
//     blocks    (0,0)(1,0)(2,0) (1,1)(2,1)(0,1) (1,2) …
//
// A lane's messages go in order, receives first, and begin at the first block boundary where they can. Bytes
// are those of mesh_program.h. The list of blocks and messages is fixed in advance from the lanes' times in
// lockstep, the same on every rank.
#ifndef MESHFILL_ENGINE_SIM_MESH_LANES_H_
#define MESHFILL_ENGINE_SIM_MESH_LANES_H_

#include "engine/sim/attention_job.h"
#include "engine/sim/cluster.h"
#include "engine/sim/placed_mesh.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

// CheckHeadGroups has passed.
RankProgram MeshLanesProgram(const AttentionJob& job, Pass pass, const PlacedMesh& mesh,
                             const Cluster& cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_MESH_LANES_H_
