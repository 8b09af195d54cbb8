// The schedule of least time by search: branch and bound over every order of communications.
//
// It knows less than OptimalSchedule (optimal_schedule.h) and so checks it: any order that the dependencies
// allow is tried, a Send O between two Recv Q as well; only the blocks of an order are row-first
// (row_first_builder.h). A branch ends where what it has exposed, and what cannot be hidden any more, is no
// less than the best found. Exponential: a 6×6 tile has some 2,500 orders.
#ifndef MESHFILL_ENGINE_SCHEDULE_SCHEDULE_SEARCH_H_
#define MESHFILL_ENGINE_SCHEDULE_SCHEDULE_SEARCH_H_

#include <cstdint>

#include "engine/schedule/schedule.h"

namespace meshfill {

// What no schedule's time in blocks is below: all blocks, or all communications and the blocks that must run
// after the last chunk arrived (the critical path), less what the Send O of earlier rows hide.
int64_t LeastTimeBound(Tile tile, OverlapCosts costs);

// The tile is positive, no cost negative.
Schedule SearchSchedule(Tile tile, OverlapCosts costs);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_SCHEDULE_SEARCH_H_
