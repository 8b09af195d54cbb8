// Mesh-Attention as a program of the simulator: engine/run/executor.cc's order of messages and blocks, with
// the bytes and FLOPs of each. Covers Ring (a = 1), pass-Q (b = 1), and both inside head groups (USP,
// Ulysses, head × mesh).
//
// Bytes per rank: forward (a−1) Q + (b−1) KV + (a−1) O; backward (a−1) (OdOQ + dQ) + (b−1) (KV + dKV); with h
// > 1 also (h−1)/h of Q, KV and O forward, of OdOQ, KV, dQ and dKV backward.
#ifndef MESHFILL_ENGINE_SIM_MESH_PROGRAM_H_
#define MESHFILL_ENGINE_SIM_MESH_PROGRAM_H_

#include "engine/mesh/placement.h"
#include "engine/schedule/schedule.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/backward_schedule.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

enum class Buffers {
  kRelease,  // a chunk goes as soon as its last block has run and its last send has left: the executor
  kKeep,     // the caller's chunks stay, and so does every chunk that a tile of more than one row reuses: the
             // paper
};

// CheckHeadGroups has passed for `heads`, and CheckSchedule for the schedule.
RankProgram MeshForwardProgram(const AttentionJob& job, int heads, const Schedule& schedule,
                               Buffers buffers = Buffers::kRelease);
RankProgram MeshBackwardProgram(const AttentionJob& job, int heads, const BackwardSchedule& schedule);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_MESH_PROGRAM_H_
