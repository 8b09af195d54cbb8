// How a prompt's tokens are dealt to the ranks (Striped Attention §3, Mesh-Attention §3.7).
//
// All layouts deal stripes of `stripe` consecutive tokens; stripe s, token t = s·stripe + r:
//
//   striped     s → rank s mod n                       n = 3:  0 1 2 0 1 2 0 1 2 …
//   zigzag      2n stripes of ⌈N/2n⌉: there and back    n = 3:  0 1 2 2 1 0
//   contiguous  n stripes of ⌈N/n⌉                      n = 3:  0 1 2
//
// On one rank, positions rise with the slot, so the real tokens of every chunk are its first
// ChunkTokens(rank) slots: nothing is padded, the chunks of a ragged prompt differ in length and may be
// empty.
#ifndef MESHFILL_ENGINE_MESH_LAYOUT_H_
#define MESHFILL_ENGINE_MESH_LAYOUT_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/band.h"

namespace meshfill {

enum class LayoutKind { kStriped, kZigzag, kContiguous };
const char* LayoutName(LayoutKind kind);                        // "striped", "zigzag", "contiguous"
absl::StatusOr<LayoutKind> ParseLayout(std::string_view name);  // INVALID_ARGUMENT with the names there are

class TokenLayout {
 public:
  // `stripe` is used by the striped layout alone (the others derive theirs). INVALID_ARGUMENT
  // unless ranks ≥ 1, 1 ≤ tokens < 2^31, stripe ≥ 1.
  static absl::StatusOr<TokenLayout> Make(LayoutKind kind, int ranks, int64_t tokens, int64_t stripe);

  LayoutKind kind() const { return kind_; }
  int ranks() const { return ranks_; }
  int64_t tokens() const { return tokens_; }
  int64_t stripe() const { return stripe_; }  // tokens in a stripe, as dealt

  int RankOf(int64_t token) const;
  int64_t SlotOf(int64_t token) const;  // the token's slot on RankOf(token)
  int64_t TokenAt(int rank, int64_t slot) const { return Positions(rank).At(slot); }
  int64_t ChunkTokens(int rank) const;  // may be 0; Σ over ranks = tokens
  int64_t LargestChunkTokens() const;
  // The ranks from `rank` up to this one, it not included, have ChunkTokens(rank), too. A layout has at most
  // five such runs.
  int AlikeUntil(int rank) const;
  SlotPositions Positions(int rank) const;

  // One rank's part, by slot, of what there is for each token: [ChunkTokens(rank)] of [tokens()].
  template <typename T>
  std::vector<T> Deal(int rank, std::span<const T> by_token) const {
    const SlotPositions positions = Positions(rank);
    std::vector<T> by_slot(ChunkTokens(rank));
    for (size_t slot = 0; slot < by_slot.size(); ++slot) by_slot[slot] = by_token[positions.At(slot)];
    return by_slot;
  }

  // Head groups: ranks m·h … m·h + h−1 hold the stripes of group m, which are dealt as this layout deals, and
  // so are each group's tokens among its members. For h ≥ 1 that divides ranks():
  //
  //     TokenAt(m·h + k, slot) = Groups(h).TokenAt(m, Members(m, h).TokenAt(k, slot))
  //
  // n = 4, h = 2     striped           zigzag            contiguous
  //     ranks        0 1 2 3 0 1 2 3   0 1 2 3 3 2 1 0   0 1 2 3
  //     groups       0   1   0   1     0   1   1   0     0   1      stripes of h·stripe() tokens
  //     members      0 1 0 1 0 1 0 1   0 1 0 1 1 0 1 0   0 1 0 1
  TokenLayout Groups(int h) const;              // the prompt over ranks()/h groups
  TokenLayout Members(int group, int h) const;  // the group's slots, maybe none, over its h ranks

  std::string DebugString() const;  // "striped(n=4, tokens=1000, stripe=64)"
  bool operator==(const TokenLayout&) const = default;

 private:
  TokenLayout(LayoutKind kind, int ranks, int64_t tokens, int64_t stripe)
      : kind_(kind),
        ranks_(ranks),
        tokens_(tokens),
        stripe_(stripe),
        whole_rounds_(tokens / (stripe * ranks)) {}
  LayoutKind kind_;
  int ranks_;
  int64_t tokens_;
  int64_t stripe_;
  int64_t whole_rounds_;  // striped: every rank has this many whole stripes
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_LAYOUT_H_
