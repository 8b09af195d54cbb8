// K and V of one prompt as its ranks computed them: a slab for each rank and layer, in token-owner layout.
//
// The rank that owns a token has K and V of all its KV heads, whatever tile and head groups the run had: K
// and V are kept before they move. So a reader needs the layout of tokens alone.
#ifndef MESHFILL_ENGINE_KV_KV_SLABS_H_
#define MESHFILL_ENGINE_KV_KV_SLABS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/kv/kv_shape.h"
#include "engine/mesh/layout.h"

namespace meshfill {

struct KvSlabs {
  KvShape shape;
  TokenLayout layout;
  // By layer, then rank: K, then V, each [chunk_tokens, kv_heads, head_dim]. Null: not computed yet.
  std::vector<std::vector<std::unique_ptr<std::byte[]>>> slabs;
};

// Part of a prompt's K and V. Counts are above 0, and the range lies inside the prompt.
struct KvRange {
  int64_t first_token = 0;
  int64_t tokens = 0;
  int first_head = 0;
  int heads = 0;
};

// How K and V lie where they are copied to.
enum class KvFormat {
  kTokens,    // K, then V, each [tokens, heads, head_dim]
  kPagesHnd,  // [pages][heads][page_tokens][2·head_dim], K beside V
  kPagesNhd,  // [pages][page_tokens][heads][2·head_dim], K beside V
};

// Bytes of a range: with pages, whole ones. `page_tokens` is not read with kTokens.
int64_t KvRangeBytes(const KvShape& shape, const KvRange& range, KvFormat format, int64_t page_tokens);

// Copies a range of one layer, whose slabs are all there, to `to`. The first page begins at the range's first
// token; what the last page lacks in tokens is filled with zeros. Cost: each byte is moved once, in pieces of
// a stripe's tokens (kTokens, all heads) or of a head's row.
void CopyKv(const KvSlabs& slabs, int layer, const KvRange& range, KvFormat format, int64_t page_tokens,
            std::byte* to);
// Copies a range as CopyKv does with kTokens, K and V to places of their own.
void CopyKvTokens(const KvSlabs& slabs, int layer, const KvRange& range, std::byte* k, std::byte* v);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_SLABS_H_
