// What a plan decides before its schedule: what is sent, held and computed depends on no more than this and a
// schedule.
#ifndef MESHFILL_ENGINE_PLAN_PLAN_SHAPE_H_
#define MESHFILL_ENGINE_PLAN_PLAN_SHAPE_H_

#include <cstdint>

#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/topology.h"
#include "kernels/dtype.h"

namespace meshfill {

// The head groups were found possible (ModelShape::CanSplitHeads) and divide the layout's ranks; the tile is
// that of each of the meshes of ranks/heads.
struct PlanShape {
  TokenLayout layout;  // of the prompt
  int heads = 1;
  Tile tile;
  DType partial_dtype = DType::kF32;
  int64_t cached_tokens = 0;  // before the prompt; its queries see their keys, which are dealt with its own
  Links links;
  bool one_memory = true;  // ranks are threads on one device: a chunk is there once, however many hold it
};

// How the keys are dealt: those of a cached prefix like those of the prompt.
inline TokenLayout KvLayout(const TokenLayout& layout, int64_t cached_tokens) {
  if (cached_tokens == 0) return layout;
  return TokenLayout::Make(layout.kind(), layout.ranks(), layout.tokens() + cached_tokens, layout.stripe())
      .value();
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLAN_SHAPE_H_
