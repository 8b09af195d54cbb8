// The schedule of least time, for tiles of any size: what Mesh-Attention §3.5 approximates by Algorithm 2.
//
// Time is Σ max(communication, blocks) in units of a block, under the rules of schedule.h: at most one
// communication a step, and a chunk is usable from the step after the one that received it. Three facts make
// the optimum cheap:
//
//  1. Given the order of communications, row-first blocks are best (row_first_builder.h), and the time is
//  that of all
//     communications plus the blocks that none hides. So only the order is searched.
//  2. A Send O needs all KV, and swapping a Send O with a Recv Q right behind it never hides fewer blocks:
//  blocks become
//     ready earlier, deadlines come later. So some best order receives everything first, and is a path of
//     Recv Q (down) and Recv KV (right) through the lattice of what has arrived, followed by a−1 Send O:
//
//            kv 1   2   3
//         q 1   ·→──·   ·      q = Q chunks here, kv = KV chunks here;
//           2   ·   ·→──·      the blocks that are ready: q·kv
//           3   ·   ·   ·
//
//  3. On such a path the blocks that stay exposed are the worst bottleneck, not a sum: for a step on it and a
//  row
//     k ≤ a−1, of the k·b blocks of rows 1 … k those that are not ready when the step starts must fit into
//     the communications after it and before the k-th Send O; likewise all a·b blocks before the end.
//     (Row-first serves rows 1 … k before all others for every k at once, so they queue as if alone, and a
//     queue's shortfall is the largest over its busy periods.) What follows a step hides the same whatever
//     the path, so each edge of the lattice has one shortfall, and the best order is a path whose largest
//     shortfall is least: O(a·b).
//
// Of the orders of least time, those that are compared take each Q as late as they may, each KV as late as
// they may, or Algorithm 2's choice where it is among them; and each Send O as soon as it costs nothing. The
// one whose chunks weigh least at their peak (schedule_cost.h) is taken.
#ifndef MESHFILL_ENGINE_OPTIMAL_SCHEDULE_H_
#define MESHFILL_ENGINE_OPTIMAL_SCHEDULE_H_

#include "engine/schedule.h"

namespace meshfill {

// The tile and the costs are positive. Passes CheckSchedule; the same for the same arguments on every rank.
Schedule OptimalSchedule(Tile tile, OverlapCosts costs);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_OPTIMAL_SCHEDULE_H_
