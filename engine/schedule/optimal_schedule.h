// The schedule of least time, for tiles of any size: what Mesh-Attention §3.5 approximates by Algorithm 2.
//
// Time is Σ max(communication, blocks) in units of a block, under the rules of schedule.h: at most one
// communication a step, and a chunk is usable from the step after the one that received it. Three facts make
// the optimum cheap.
//
// First, given the order of communications, row-first blocks are best (row_first_builder.h), and the time is
// that of all communications plus the blocks that none of them hides. So only the order is searched.
//
// Second, a Send O needs all KV, and swapping a Send O with a Recv Q right behind it never hides fewer
// blocks: blocks become ready earlier, deadlines come later. So some best order receives everything first. It
// is a path of Recv Q (down) and Recv KV (right) through the lattice of what has arrived, with q·kv blocks
// ready at each node, and then a−1 Send O. Of 2×3 with c_Q = c_O = 2, c_KV = 1, Algorithm 2 takes 9 blocks'
// time, and the best path 7:
//
//           kv=1   2     3                kv=1   2     3
//      q=1   ·──▶──·──▶──·           q=1   ·
//                        │                 │
//                        ▼                 ▼
//      q=2               ·           q=2   ·──▶──·──▶──·
//
// Third, on such a path the blocks that stay exposed are its worst bottleneck, not a sum. For a receive on it
// and a row k ≤ a−1: those blocks of rows 1 … k that are not ready when the receive starts must fit into the
// communications after it and before the k-th Send O; likewise all blocks that are not ready, before the end.
// What does not fit is the receive's shortfall. (Row-first serves rows 1 … k before all others, for every k
// at once, so they queue as if alone, and what a queue leaves undone is the largest shortfall over its past.)
// The communications after a receive are the same whatever the path, so each edge of the lattice has one
// shortfall, and the best order is a path whose largest shortfall is least: time O(a·b).
//
// Three of the orders of least time are compared: KV first where it may be, Q first where it may be, and
// Algorithm 2's choice where it may be; in each, a Send O goes as soon as that costs nothing. The one whose
// chunks weigh least at their peak (schedule_cost.h) is taken.
#ifndef MESHFILL_ENGINE_SCHEDULE_OPTIMAL_SCHEDULE_H_
#define MESHFILL_ENGINE_SCHEDULE_OPTIMAL_SCHEDULE_H_

#include "engine/schedule/schedule.h"

namespace meshfill {

// The tile is positive, no cost negative: beside a message of cost 0 nothing is computed. Passes
// CheckSchedule; the same for the same arguments on every rank.
Schedule OptimalSchedule(Tile tile, OverlapCosts costs);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_OPTIMAL_SCHEDULE_H_
