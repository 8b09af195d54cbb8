// What a schedule costs on paper: its time in blocks, its memory in chunks (Mesh-Attention §3.5).
#ifndef MESHFILL_ENGINE_SCHEDULE_SCHEDULE_COST_H_
#define MESHFILL_ENGINE_SCHEDULE_SCHEDULE_COST_H_

#include <cstdint>

#include "engine/schedule/schedule.h"

namespace meshfill {

// Blocks that `comm` hides; 0 for none.
int CommBlocks(std::optional<Traffic> comm, OverlapCosts costs);

// Σ max(communication, blocks) over the steps, where no communication outlasts its step.
int64_t TimeInBlocks(const Schedule& schedule, OverlapCosts costs);

// The most that the chunks on one rank weigh at once, where a chunk weighs what its transfer costs. A Q or KV
// chunk lives from the start of the step that receives it to its last block, or to the end of the step that
// passes it on; an O from its row's first block, or from the start of the step in which its partial arrives,
// to the end of its Send O. The schedule has passed CheckSchedule.
int64_t PeakChunkCost(const Schedule& schedule, OverlapCosts costs);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_SCHEDULE_COST_H_
