// The schedule of a backward pass (Mesh-Attention §3.6, Algorithm 3): cost only, for the simulator. Meshfill
// serves prefill and never runs one.
//
// Q groups pass OdOQ chunks (O, dO, Q and LSE) and return dQ; KV groups pass KV chunks and return dKV. The
// k-th Send dQ (from 0) sends dQ#k+1 and receives dQ#(k+2) mod a, the k-th Send dKV likewise along b. Row 0
// and column 0 are the rank's own and come last. Per rank: (a−1) OdOQ + (b−1) KV + (a−1) dQ + (b−1) dKV. For
// 2×2, all costs 1:
//
//     step    0      1      2      3      4
//     comm    kv     q      dq     dkv    none
//     blocks  (0,0)  (0,1)  (1,1)  …
#ifndef MESHFILL_ENGINE_SIM_BACKWARD_SCHEDULE_H_
#define MESHFILL_ENGINE_SIM_BACKWARD_SCHEDULE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/mesh/mesh.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

struct BackwardSchedule {
  Tile tile;
  std::vector<Step> steps;  // steps of kQ (OdOQ), kKv, kDq and kDkv

  std::string DebugString() const;
  bool operator==(const BackwardSchedule&) const = default;
};

// How many block computations hide the transfer of one chunk; each ≥ 1.
struct BackwardCosts {
  int c_odoq = 1;
  int c_kv = 1;
  int c_dq = 1;
  int c_dkv = 1;
  bool operator==(const BackwardCosts&) const = default;
};

// Which gradients a schedule finishes first.
enum class BackwardOrder {
  kAlternate,     // whichever leaves sooner for its cost (Algorithm 3)
  kRowsFirst,     // dQ; the last to leave is a dKV
  kColumnsFirst,  // dKV; the last to leave is a dQ
};

// Algorithm 3, or its steps with blocks in another order. The tile and the costs are positive.
BackwardSchedule GreedyBackwardSchedule(Tile tile, BackwardCosts costs,
                                        BackwardOrder order = BackwardOrder::kAlternate);

// INTERNAL naming the step and what is wrong unless every block is computed exactly once after its chunks
// arrived in an earlier step; there are a−1 Recv OdOQ, b−1 Recv KV, a−1 Send dQ and b−1 Send dKV; a gradient
// is sent after all blocks of its row or column; and no step is idle.
absl::Status CheckBackwardSchedule(const BackwardSchedule& schedule);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SIM_BACKWARD_SCHEDULE_H_
