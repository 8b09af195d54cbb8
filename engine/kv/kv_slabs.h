// K and V of one prompt as its ranks computed them: for each run a slab of each rank and layer, in
// token-owner layout.
//
// The rank that owns a token has K and V of all its KV heads, whatever tile and head groups the run had: K
// and V are kept before they move. So a reader needs the layout of tokens alone. Prompts that begin alike
// share the slabs of what they have in common:
//
//     prompt 1   | run 1: tokens 0 … 999            |
//     prompt 2   | tokens 0 … 511 of run 1 | run 2: tokens 512 … 799 |
#ifndef MESHFILL_ENGINE_KV_KV_SLABS_H_
#define MESHFILL_ENGINE_KV_KV_SLABS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv/kv_charge.h"
#include "engine/kv/kv_shape.h"
#include "engine/kv/kv_slab.h"
#include "engine/mesh/layout.h"

namespace meshfill {

// What the ranks of one run computed.
struct KvRunSlabs {
  TokenLayout layout;  // which rank and slot has each of the run's tokens
  std::vector<std::vector<std::unique_ptr<KvSlab>>> slabs;  // by layer, then rank; null: not computed yet
  std::vector<std::shared_ptr<const KvCharge>> charges;     // charge the slabs' bytes; none: nobody counts
};

// The run's tokens 0 … tokens − 1, which are the prompt's from `first_token` on.
struct KvPiece {
  int64_t first_token = 0;
  int64_t tokens = 0;
  std::shared_ptr<const KvRunSlabs> run;
};

struct KvSlabs {
  KvShape shape;
  std::vector<KvPiece> pieces;  // one after the other, from token 0 on

  int64_t tokens() const { return pieces.empty() ? 0 : pieces.back().first_token + pieces.back().tokens; }
  // The piece that `token` is in; the next piece begins after it.
  const KvPiece& PieceOf(int64_t token) const;
};

// The first `tokens` of them, which are there.
KvSlabs FirstTokens(const KvSlabs& slabs, int64_t tokens);

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
// a stripe's tokens (kTokens, all heads) or of a head's row. A slab that is on its device alone is brought to
// the host first; the error of that.
absl::Status CopyKv(const KvSlabs& slabs, int layer, const KvRange& range, KvFormat format,
                    int64_t page_tokens, std::byte* to);
// Copies a range as CopyKv does with kTokens, K and V to places of their own.
absl::Status CopyKvTokens(const KvSlabs& slabs, int layer, const KvRange& range, std::byte* k, std::byte* v);

// Rows of consecutive slots of a chunk, which are consecutive slots of a slab.
struct KvRows {
  KvSlab* slab = nullptr;
  int64_t first_slot = 0;  // first slot within the slab
  int64_t slots = 0;
};
// Where the rows of a rank's chunk lie from `slot` on, up to `most` slots (≥ 1), where `layout` deals the
// prompt's tokens: all of them in one piece where the runs dealt their tokens alike, else a stripe or less.
KvRows KvRowsOf(const KvSlabs& slabs, int layer, const TokenLayout& layout, int rank, int64_t slot,
                int64_t most);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_SLABS_H_
