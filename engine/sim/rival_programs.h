// Strategies that Meshfill does not run, as programs of the simulator, to compare with.
//
// Chunks that were gathered lie together: one launch attends with all of them.
#ifndef MESHFILL_ENGINE_SIM_RIVAL_PROGRAMS_H_
#define MESHFILL_ENGINE_SIM_RIVAL_PROGRAMS_H_

#include "engine/mesh/mesh.h"
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

// StarTrail (Mesh-Attention §3.8, Table 2) in each of `heads` head groups: teams of C ranks gather their Q, K
// and V, place the KV of their team where its ring starts, pass it round rings of n/C² ranks, and reduce the
// outputs in the team: 3(C−1) + 2C + 2(n/C − C) + (C−1) Q chunks per rank of n. Only the rings overlap with
// blocks. C² divides n. Backward, by the same paths: OdOQ and KV gathered, KV placed and passed round, dKV
// one block behind it, returned and reduced, dQ reduced.
struct StarTrail {
  int heads = 1;
  int ranks = 1;  // n, of one head group's star
  int team = 1;

  int all_ranks() const { return heads * ranks; }
  int ring() const { return ranks / (team * team); }
  // Ranks of sub-ring i, its team y, place x in the team.
  Grid star() const { return {.planes = team, .rows = ring(), .columns = team}; }
  // The same of all head groups: plane i·heads + k is sub-ring i of member k.
  Grid grid() const { return {.planes = heads * team, .rows = ring(), .columns = team}; }
};
RankProgram StarTrailProgram(const AttentionJob& job, const StarTrail& star, Pass pass);

// Rings side by side in each of `heads` head groups, forward (TASP): each carries its part of every chunk,
// and leaves a node from another of its GPUs, so that one ring's flow is no limit. 1 ring is USP's.
//
//     span 3     ring 0   0 1 2 | 3 4 5 | …     ranks of a head group, those of `span` in a node
//                ring 1   1 2 0 | 4 5 3 | …
//                ring 2   2 0 1 | 5 3 4 | …
struct ParallelRings {
  int heads = 1;
  int places = 1;  // ranks of a ring
  int span = 1;    // divides places
  int rings = 1;   // at most span

  int ranks() const { return heads * places; }
};
RankProgram ParallelRingsProgram(const AttentionJob& job, const ParallelRings& rings);

// Attention2D, forward: the mesh's tiles by collectives. Q is gathered along the rows of the a × b tile, and
// with it, or with blocks beside it (`overlaps`), KV along its columns; at last O is reduced and scattered.
struct Attention2d {
  int heads = 1;
  Tile tile;
  bool overlaps = false;
};
RankProgram Attention2dProgram(const AttentionJob& job, const Attention2d& attention);

// A ring whose KV chunks go round both ways at once, half of them each way: n − 1 hops as in a ring, two
// under way in each step. Forward only.
RankProgram TwoWayRingProgram(const AttentionJob& job, int ranks);

// Tensor parallelism × context parallelism, forward (Llama 3, vLLM): groups of `tensor` ranks gather the
// layer's input ([tokens, q_heads · head_dim]) and share its heads, and reduce and scatter the outputs
// (Megatron's sequence-parallel activations); neither overlaps. Between the groups KV is gathered whole
// before attention, or goes round `rings` side by side with blocks beside it. `tensor` 1 is all-gather KV,
// all of the ranks is Megatron. CheckHeadGroups has passed for `tensor`.
struct TensorContext {
  int tensor = 1;
  ParallelRings context;  // the rings between the groups, in `tensor` head groups
  bool gathers = true;
};
RankProgram TensorContextProgram(const AttentionJob& job, const TensorContext& plan);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_RIVAL_PROGRAMS_H_
