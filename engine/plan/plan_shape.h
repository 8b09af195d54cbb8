// What a plan decides before its schedule: what is sent, held and computed depends on no more than this and a
// schedule.
#ifndef MESHFILL_ENGINE_PLAN_PLAN_SHAPE_H_
#define MESHFILL_ENGINE_PLAN_PLAN_SHAPE_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/topology.h"
#include "kernels/dtype.h"

namespace meshfill {

// The most slices in which head groups exchange a layer's chunks.
inline constexpr int kMostExchanges = 32;

// The head groups were found possible (ModelShape::CanSplitHeads) and divide the layout's ranks; the tile is
// that of each of the meshes of ranks/heads.
struct PlanShape {
  TokenLayout layout;  // who has which of the prompt's tokens, the queries
  int heads = 1;
  Tile tile;
  int kv_inner = 0;  // ranks of an inner ring of KV; 0: KV goes round one ring (mesh.h)
  DType partial_dtype = DType::kF32;
  int64_t cached_tokens = 0;  // before the prompt; its queries see their keys, which are dealt with its own
  Links links;                // assumed by predictions
  bool keeps_kv = false;      // K and V of the prompt are kept, layer by layer
  bool kv_on_host = false;    // what is kept leaves the ranks' memory while the layer is computed
  bool one_memory = true;     // ranks are threads on one device: a chunk is there once, however many hold it
  // Tokens of each rank that a head group exchanges while the next ones are computed: a multiple of
  // Plan::slice_tokens. 0: all at once, between attention and what follows.
  int64_t exchange_tokens = 0;

  int ranks() const { return layout.ranks(); }
  int exchanges() const;            // slices of the longest chunk, 1 to kMostExchanges; the same on all ranks
  TokenLayout kv_layout() const;    // who has which of the keys: cached_tokens and the prompt's
  std::string DebugString() const;  // "2x2, 1 head group, striped(…), partial outputs in f32"
  bool operator==(const PlanShape&) const = default;
};

// The layout of the keys where the queries have `layout`: a cached prefix is dealt like the prompt.
inline TokenLayout KvLayout(const TokenLayout& layout, int64_t cached_tokens) {
  if (cached_tokens == 0) return layout;
  return TokenLayout::Make(layout.kind(), layout.ranks(), layout.tokens() + cached_tokens, layout.stripe())
      .value();
}

// Whether each rank's new keys are behind its own of the prefix, so that none has to move: rounds of all
// ranks' stripes come before.
inline bool CanFollow(const TokenLayout& layout, int64_t cached_tokens) {
  return cached_tokens == 0 ||
         (layout.kind() == LayoutKind::kStriped && cached_tokens % (layout.ranks() * layout.stripe()) == 0);
}

// Tokens of the slices in which a rank computes its chunk, where they have `most`. Those of a cached prefix
// pass through the same buffers, a stripe at a time where the chunk has less.
inline int64_t SliceTokens(const PlanShape& shape, int rank, int64_t most) {
  const int64_t least = shape.cached_tokens == 0 ? 0 : shape.layout.stripe();
  return std::min(most, std::max(least, shape.layout.ChunkTokens(rank)));
}

// Tokens of the slices that a plan is computed in, where its backend has `most`.
inline int64_t PlanSliceTokens(const PlanShape& shape, int64_t most) {
  return shape.exchanges() == 1 ? most : std::min(most, shape.exchange_tokens);
}

inline TokenLayout PlanShape::kv_layout() const { return KvLayout(layout, cached_tokens); }

inline int PlanShape::exchanges() const {
  if (heads == 1 || exchange_tokens == 0) return 1;
  return static_cast<int>((layout.LargestChunkTokens() + exchange_tokens - 1) / exchange_tokens);
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLAN_SHAPE_H_
