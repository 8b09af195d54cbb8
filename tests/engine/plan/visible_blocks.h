// What the queries of each chunk see of each chunk's keys, by trying all pairs: attention's definition.
#ifndef MESHFILL_TESTS_ENGINE_PLAN_VISIBLE_BLOCKS_H_
#define MESHFILL_TESTS_ENGINE_PLAN_VISIBLE_BLOCKS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/plan/plan_shape.h"

namespace meshfill {

struct VisibleBlock {
  int64_t pairs = 0;
  int64_t first_key = 0;  // slots of the keys that some query sees: from here
  int64_t end_key = 0;    // to here
};

// Of one mesh: [Q chunk][KV chunk].
inline std::vector<std::vector<VisibleBlock>> VisibleBlocksOf(const PlanShape& shape, int64_t window) {
  const TokenLayout q = shape.layout.Groups(shape.heads), kv = shape.kv_layout().Groups(shape.heads);
  const int ranks = q.ranks();
  std::vector<std::vector<VisibleBlock>> blocks(ranks, std::vector<VisibleBlock>(ranks));
  for (int i = 0; i < ranks; ++i) {
    for (int j = 0; j < ranks; ++j) {
      VisibleBlock& block = blocks[i][j];
      block.first_key = kv.ChunkTokens(j);
      for (int64_t k = 0; k < kv.ChunkTokens(j); ++k) {
        const int64_t pairs_before = block.pairs;
        for (int64_t t = 0; t < q.ChunkTokens(i); ++t) {
          const int64_t back = shape.cached_tokens + q.TokenAt(i, t) - kv.TokenAt(j, k);
          if (back >= 0 && (window == 0 || back < window)) ++block.pairs;
        }
        if (block.pairs == pairs_before) continue;
        block.first_key = std::min(block.first_key, k);
        block.end_key = k + 1;
      }
    }
  }
  return blocks;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_PLAN_VISIBLE_BLOCKS_H_
