// A schedule: what each rank computes while which chunk moves (Mesh-Attention §3.4, §3.5, Algorithm 2).
//
// One schedule serves all ranks: it names chunks by local index (mesh.h), and every rank runs its steps in
// lockstep order. A step starts at most one communication, computes its blocks while that is under way, and
// ends when both are done. The k-th Recv Q (from 0) sends Q#k and receives Q#k+1; Recv KV likewise; the k-th
// Send O sends O#k+1 and receives O#(k+2) mod a, merging it into the rank's own. For a tile 3×3
// with c_Q = c_O = 1 and c_KV = 2, Algorithm 2 yields
//
//     step    0      1      2      3      4      5      6      7
//     comm    q      kv     q      kv     none   o      o      none
//     blocks  (0,0)  (1,0)  (1,1)  (2,0)  (1,2)  (2,2)  (0,1)  (0,2)
//                                  (2,1)
//
// A step costs max(communication, its blocks); bytes per rank are (a−1) Q + (b−1) KV + (a−1) O.
//
// A communication may outlast its step: it ends with the last of the steps that it spans, and meanwhile one
// along each other ring (mesh.h) may be under way (multi_ring_schedule.h):
//
//     step          0      1      2      3
//     along KV      kv, which spans 3    kv …
//     along Q              q      q             Recv Q, and then Send O
//
// Of a double ring, Recv KV are of either ring, in one order: for each inner ring but the last the outer one
// that brings the next, then those inside. b = 6, kv_inner = 3:
//
//     Recv KV       0      1      2      3      4
//     inside               0 → 1  1 → 2  3 → 4  4 → 5       0 → 1: sends KV#0, receives KV#1
//     outer         0 → 3
#ifndef MESHFILL_ENGINE_SCHEDULE_SCHEDULE_H_
#define MESHFILL_ENGINE_SCHEDULE_SCHEDULE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/traffic.h"

namespace meshfill {

struct BlockIndex {
  int u = 0;  // row: Q#u, O#u
  int v = 0;  // column: KV#v
  bool operator==(const BlockIndex&) const = default;
};

struct Step {
  std::optional<Traffic> comm;  // nullopt: none; Recv Q, Recv KV and Send O by what they move
  std::vector<BlockIndex> blocks;
  int spans = 1;  // steps until `comm` has ended, this one included
  bool operator==(const Step&) const = default;
};
const char* CommName(std::optional<Traffic> comm);  // "none", "q", "kv", "o": the names of plan --json

struct Schedule {
  Tile tile;
  std::vector<Step> steps;
  int kv_inner = 0;  // ranks of an inner ring of KV; 0: KV goes round one ring (mesh.h)

  std::string DebugString() const;
  bool operator==(const Schedule&) const = default;
};

// The number-th Recv KV of a schedule, from 0: the ring, and the local indices of what it sends and receives.
struct KvHop {
  Ring ring = Ring::kKv;
  int sent = 0;
  int received = 0;
};
inline KvHop KvHopOf(Tile tile, int kv_inner, int number) {
  const int last = tile.b - kv_inner;  // the first chunk of the last round
  if (kv_inner == 0 || number >= last) return {Ring::kKv, number, number + 1};
  if (number % kv_inner != 0) return {Ring::kKv, number - 1, number};
  return {Ring::kKvOuter, number, number + kv_inner};
}

// How many block computations hide the transfer of one chunk; each ≥ 1 (Mesh-Attention §3.5).
struct OverlapCosts {
  int c_q = 1;
  int c_kv = 1;
  int c_o = 1;
  bool operator==(const OverlapCosts&) const = default;
};

// Algorithm 2. The tile and the costs are positive.
Schedule GreedySchedule(Tile tile, OverlapCosts costs);

// The gate that every schedule passes before it runs. INTERNAL naming the step and what is wrong unless
//  - every block of the tile is computed exactly once, after its Q and its KV arrived in an earlier step;
//  - a communication sends what an earlier step has received, and ends in a step that is there, before the
//    next one along its ring starts;
//  - there are exactly a−1 Recv Q, b−1 Recv KV and a−1 Send O: on every rank, sends and receives match;
//  - the k-th Send O comes after all blocks of row k+1, and after the Send O whose arrival it carries on;
//  - no step is idle (no communication and no block).
absl::Status CheckSchedule(const Schedule& schedule);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_SCHEDULE_H_
