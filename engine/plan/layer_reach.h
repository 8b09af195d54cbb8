// What of a layer's chunks is seen by whom, under a layout, a sliding window and a tile: what nobody sees
// does not travel, and a block without a visible pair is not computed. A pure function of the plan and the
// layer's window, so that both ends of a message agree.
//
// Queries see keys behind them, down to the window's end. Where a round of the layout's stripes is longer
// than the window, or there is one round alone (contiguous), whole blocks are hidden; n = 4, one round:
//
//            KV 0 1 2 3      KV goes on in falling order (mesh.h): chunk j to the ranks j + a, j + 2a … as
//     Q 0       ◣ . . .      long as one behind sees some of it
//       1       ◥ ◣ . .
//       2       . ◥ ◣ .      ◥ the window's end: of a contiguous chunk, only the last keys that are seen
//       3       . . ◥ ◣        go on
//
// Elsewhere every chunk is taken to be seen by all, and goes round its ring in the paper's order, which is
// the order of the sums: layers without a window, stripes in shorter rounds, zigzag, and contiguous chunks
// behind a cached prefix, which no run has. So it does in double rings.
#ifndef MESHFILL_ENGINE_PLAN_LAYER_REACH_H_
#define MESHFILL_ENGINE_PLAN_LAYER_REACH_H_

#include <cstdint>

#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/plan/plan_shape.h"

namespace meshfill {

// Slots [begin, end) of a chunk.
struct SlotRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t slots() const { return end - begin; }
  bool operator==(const SlotRange&) const = default;
};

// What the queries of a mesh's chunks reach in a layer. Each chunk, and each rank, is a head group's. Hops
// count from a chunk's own rank, which is hop 0: a Q chunk's u-th rank has it as Q#u, a KV chunk's v-th rank
// has it as KV#v. All in time O(1).
class LayerReach {
 public:
  // `window`: the layer's sliding window in tokens; 0: none.
  LayerReach(const PlanShape& shape, int64_t window);

  bool sees_all() const { return sees_all_; }
  const Mesh& mesh() const { return mesh_; }
  const TokenLayout& q_layout() const { return q_layout_; }
  const TokenLayout& kv_layout() const { return kv_layout_; }

  // Whether the block has a visible pair. Where all see all: true.
  bool Sees(int q_chunk, int kv_chunk) const;

  // Whether a Q chunk goes on to its hop-th rank. If not, it goes to none of those behind, either.
  bool QReaches(int q_chunk, int hop) const;
  // Whether its partial output goes round the ring, home from the first of these ranks.
  bool OReturns(int q_chunk) const { return QReaches(q_chunk, 1); }
  // What of a KV chunk goes on to its hop-th rank: what that one sees, or one behind. It may be nothing.
  SlotRange KvReach(int kv_chunk, int hop) const;

  // The most queries, or keys, of a message to a hop-th rank, over all chunks.
  int64_t LargestQ(int hop) const;
  int64_t LargestKv(int hop) const;
  // The most keys of a message that is a part of its chunk, and so a copy; 0: there are none. A chunk goes on
  // in part once at most, to its last rank.
  int64_t MostCutKeys() const;

 private:
  const TokenLayout q_layout_;
  const TokenLayout kv_layout_;
  const int64_t window_;
  const bool has_prefix_;
  const bool sees_all_;
  const int farthest_;  // chunks back, round the ring, that hold what some query sees
  const Mesh mesh_;
};

// What the block of local index (u, v) takes.
struct BlockPairs {
  double largest = 0;       // visible pairs on the rank that has most, for which ranks wait in lockstep
  double largest_rows = 0;  // its queries; 0: no rank has a visible pair
  double mean = 0;          // over all ranks of the mesh
  double mean_rows = 0;
};

// Visible pairs of the blocks of one mesh. All ranks together have exactly those of the prompt; where all
// are taken to see all, every block counts alike.
class LayerPairs {
 public:
  LayerPairs(const LayerReach& reach, int64_t cached_tokens, int64_t window);

  bool alike() const { return alike_; }
  BlockPairs Of(int u, int v) const;
  // At most what any order of the blocks makes the ranks wait for: `largest` and `mean` of a whole tile.
  BlockPairs LeastOfTile() const;

 private:
  BlockPairs Alike() const;
  double ChunkPairs(int64_t distance, bool ragged) const;

  const LayerReach& reach_;
  const int64_t cached_tokens_;
  const int64_t window_;
  const bool alike_;
  const int64_t stripe_;
  const int64_t whole_chunks_;  // contiguous: as long as the first
  const int64_t rest_;          // tokens of the one behind them
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_LAYER_REACH_H_
