// Strategies that Meshfill does not run, as programs of the simulator, to compare with.
#ifndef MESHFILL_ENGINE_SIM_RIVAL_PROGRAMS_H_
#define MESHFILL_ENGINE_SIM_RIVAL_PROGRAMS_H_

#include "engine/mesh/placement.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

// A ring of windows × window ranks in each of `heads` head groups: while a chunk goes round the window, the
// next window's is under way (LoongTrain's head × double ring; with one head group BurstAttention's).
//
// KV per rank: windows·(window − 1) hops inside the window, windows − 1 between windows. Backward, dKV
// follows one block behind KV; where `moves_queries`, OdOQ and dQ go round in their place (BurstAttention's
// GAO).
struct DoubleRing {
  int heads = 1;
  int windows = 1;
  int window = 1;
  bool moves_queries = false;

  int ranks() const { return heads * windows * window; }
  Grid grid() const { return {.planes = heads, .rows = windows, .columns = window}; }
};
RankProgram DoubleRingProgram(const AttentionJob& job, const DoubleRing& ring, Pass pass);

// StarTrail (Mesh-Attention §3.8, Table 2): teams of C ranks gather their Q, K and V, place the KV of their
// team where its ring starts, pass it round rings of n/C² ranks, and reduce the outputs in the team: 3(C−1) +
// 2C + 2(n/C − C) + (C−1) Q chunks per rank. Only the rings overlap with blocks. C² divides n. Backward, by
// the same paths: OdOQ and KV gathered, KV placed and passed round, dKV passed round, returned and reduced,
// dQ reduced.
struct StarTrail {
  int ranks = 1;
  int team = 1;

  // Ranks of sub-ring i, its team y, place x in the team.
  Grid grid() const { return {.planes = team, .rows = ranks / (team * team), .columns = team}; }
};
RankProgram StarTrailProgram(const AttentionJob& job, const StarTrail& star, Pass pass);

// A ring whose KV chunks go round both ways at once, half of them each way: n − 1 hops as in a ring, two
// under way in each step. Forward only.
RankProgram TwoWayRingProgram(const AttentionJob& job, int ranks);

// Megatron-style tensor parallelism with sequence-parallel activations: an all-gather of the layer's input
// ([tokens, q_heads · head_dim]) before the heads' attention, a reduce-scatter after it; neither overlaps.
// Forward only. `ranks` divides the query heads.
RankProgram TensorParallelProgram(const AttentionJob& job, int ranks);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_RIVAL_PROGRAMS_H_
