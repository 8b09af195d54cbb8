#include "engine/kv/kv_slabs.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Where K, or V, of a token and a head goes: strides of three axes, in bytes.
struct Destination {
  std::byte* base = nullptr;
  int64_t page_tokens = std::numeric_limits<int64_t>::max();
  int64_t page_stride = 0;
  int64_t token_stride = 0;  // inside a page
  int64_t head_stride = 0;

  std::byte* At(int64_t token) const {
    return base + token / page_tokens * page_stride + token % page_tokens * token_stride;
  }
};

// Rows of one head after another, where both sides have the heads outermost or the rows in one piece.
void CopyRows(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t rows,
              int64_t row_bytes) {
  if (from_stride == row_bytes && to_stride == row_bytes) {
    std::memcpy(to, from, static_cast<size_t>(rows * row_bytes));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(row_bytes));
  }
}

// Tokens that lie one after the other in the slab and in their page.
void CopyRun(const std::byte* from, int64_t slot_bytes, const Destination& to, int64_t token, int64_t tokens,
             int heads, int64_t head_bytes) {
  std::byte* const first = to.At(token);
  if (to.head_stride == head_bytes) {  // a token's heads are one piece
    CopyRows(from, slot_bytes, first, to.token_stride, tokens, heads * head_bytes);
    return;
  }
  for (int head = 0; head < heads; ++head) {
    CopyRows(from + head * head_bytes, slot_bytes, first + head * to.head_stride, to.token_stride, tokens,
             head_bytes);
  }
}

// Where K of a token lies, and V behind that of all its rank's tokens.
struct Source {
  const KvPiece* piece = nullptr;
  int64_t token = 0;  // position in the run
  int rank = 0;
  int64_t slot = 0;

  Source(const KvSlabs& slabs, int64_t prompt_token) : piece(&slabs.PieceOf(prompt_token)) {
    token = prompt_token - piece->first_token;
    rank = piece->run->layout.RankOf(token);
    slot = piece->run->layout.SlotOf(token);
  }

  KvSlab* Slab(int layer) const { return piece->run->slabs[layer][rank].get(); }
  // Tokens from here on that lie one after the other.
  int64_t Run() const {
    const int64_t stripe = piece->run->layout.stripe();
    return std::min(stripe - token % stripe, piece->tokens - token);
  }
};

// K (half 0) or V (half 1).
absl::Status CopyHalf(const KvSlabs& slabs, int layer, int half, const KvRange& range,
                      const Destination& to) {
  const int64_t head_bytes = slabs.shape.head_bytes();
  const int64_t slot_bytes = slabs.shape.kv_heads * head_bytes;
  const int64_t end = range.first_token + range.tokens;
  for (int64_t token = range.first_token; token < end;) {
    const int64_t offset = token - range.first_token;
    const Source source(slabs, token);
    const int64_t page_rest = to.page_tokens - offset % to.page_tokens;
    const int64_t run = std::min({source.Run(), page_rest, end - token});
    KvSlab& slab = *source.Slab(layer);
    RETURN_IF_ERROR(slab.BringToHost());
    CopyRun(slab.Row(half, source.slot) + range.first_head * head_bytes, slot_bytes, to, offset, run,
            range.heads, head_bytes);
    token += run;
  }
  return absl::OkStatus();
}

Destination TokensAt(std::byte* base, int heads, int64_t head_bytes) {
  return {.base = base, .token_stride = heads * head_bytes, .head_stride = head_bytes};
}

Destination PagesAt(std::byte* base, KvFormat format, int64_t page_tokens, int heads, int64_t head_bytes) {
  Destination to = {
      .base = base, .page_tokens = page_tokens, .page_stride = page_tokens * heads * 2 * head_bytes};
  const bool heads_outermost = format == KvFormat::kPagesHnd;
  to.token_stride = (heads_outermost ? 1 : heads) * 2 * head_bytes;
  to.head_stride = (heads_outermost ? page_tokens : 1) * 2 * head_bytes;
  return to;
}

// The last page's tokens that the range has not.
void ZeroRest(const Destination& page, int64_t tokens, int heads, int64_t head_bytes) {
  for (int64_t token = tokens; token % page.page_tokens != 0; ++token) {
    for (int head = 0; head < heads; ++head) {
      std::memset(page.At(token) + head * page.head_stride, 0, static_cast<size_t>(2 * head_bytes));
    }
  }
}

}  // namespace

const KvPiece& KvSlabs::PieceOf(int64_t token) const {
  const auto next =
      std::upper_bound(pieces.begin(), pieces.end(), token,
                       [](int64_t position, const KvPiece& piece) { return position < piece.first_token; });
  return *std::prev(next);
}

KvSlabs FirstTokens(const KvSlabs& slabs, int64_t tokens) {
  KvSlabs first = {.shape = slabs.shape, .pieces = {}};
  for (KvPiece piece : slabs.pieces) {
    piece.tokens = std::min(piece.tokens, tokens - piece.first_token);
    if (piece.tokens <= 0) break;
    first.pieces.push_back(std::move(piece));
  }
  return first;
}

int64_t KvRangeBytes(const KvShape& shape, const KvRange& range, KvFormat format, int64_t page_tokens) {
  const int64_t tokens = format == KvFormat::kTokens
                             ? range.tokens
                             : (range.tokens + page_tokens - 1) / page_tokens * page_tokens;
  return 2 * tokens * range.heads * shape.head_bytes();
}

absl::Status CopyKvTokens(const KvSlabs& slabs, int layer, const KvRange& range, std::byte* k, std::byte* v) {
  const int64_t head_bytes = slabs.shape.head_bytes();
  RETURN_IF_ERROR(CopyHalf(slabs, layer, 0, range, TokensAt(k, range.heads, head_bytes)));
  return CopyHalf(slabs, layer, 1, range, TokensAt(v, range.heads, head_bytes));
}

absl::Status CopyKv(const KvSlabs& slabs, int layer, const KvRange& range, KvFormat format,
                    int64_t page_tokens, std::byte* to) {
  const int64_t head_bytes = slabs.shape.head_bytes();
  if (format == KvFormat::kTokens) {
    return CopyKvTokens(slabs, layer, range, to, to + range.tokens * range.heads * head_bytes);
  }
  Destination pages = PagesAt(to, format, page_tokens, range.heads, head_bytes);
  ZeroRest(pages, range.tokens, range.heads, head_bytes);
  RETURN_IF_ERROR(CopyHalf(slabs, layer, 0, range, pages));
  pages.base += head_bytes;
  return CopyHalf(slabs, layer, 1, range, pages);
}

KvRows KvRowsOf(const KvSlabs& slabs, int layer, const TokenLayout& layout, int rank, int64_t slot,
                int64_t most) {
  const Source first(slabs, layout.TokenAt(rank, slot));
  KvRows rows = {.slab = first.Slab(layer), .first_slot = first.slot};
  while (rows.slots < most) {
    const int64_t token = layout.TokenAt(rank, slot + rows.slots);
    const Source source(slabs, token);
    const bool follows =
        source.piece == first.piece && source.rank == first.rank && source.slot == first.slot + rows.slots;
    if (!follows) break;
    rows.slots += std::min({source.Run(), layout.stripe() - token % layout.stripe(), most - rows.slots});
  }
  return rows;
}

}  // namespace meshfill
