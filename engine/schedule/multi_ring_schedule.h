// A schedule with several messages under way at once, one along each ring of a mesh: the Q rings, the KV
// rings, and the outer rings where KV goes round a double ring. The Mesh-Attention paper leaves this as
// future work; LoongTrain's double ring (arXiv 2406.18485) does it for keys.
//
//     Q rings    [Recv Q#1][Recv Q#2]      …     [Send O#1]   [Send O#2]         inside a node, say
//     KV rings   [Recv KV#1     ][Recv KV#2     ][Recv KV#3     ]                between nodes
//     blocks     (0,0)(1,0)(2,0) (1,1)(2,1)(0,1) (1,2) …
//
// b = 6, kv_inner = 3:
//
//     inner      [KV#1][KV#2]      [KV#4][KV#5]                                  inside a node
//     outer      [Recv KV#3       ]                                              between nodes
//
// Along a ring messages go in order, and begin at the first block boundary where they can. Blocks are
// row-first (row_first_builder.h), so that a row that must be sent is whole in time.
#ifndef MESHFILL_ENGINE_SCHEDULE_MULTI_RING_SCHEDULE_H_
#define MESHFILL_ENGINE_SCHEDULE_MULTI_RING_SCHEDULE_H_

#include "engine/schedule/messages_under_way.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

// What the steps of a layer are taken to need.
struct RingSeconds {
  double block = 0;
  MessageSeconds q, kv, o;
  MessageSeconds kv_outer = {};  // of a double ring
};

// The tile is positive, no time negative, CanSplitKvRing has passed. Passes CheckSchedule; the same for the
// same arguments.
Schedule MultiRingSchedule(Tile tile, int kv_inner, const RingSeconds& seconds);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_MULTI_RING_SCHEDULE_H_
