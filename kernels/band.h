// Which keys a query sees, stated by positions (Striped Attention §3, Mesh-Attention §3.7).
//
// Every layout deals stripes of `width` consecutive tokens to the ranks so that, on one rank, the stripes'
// positions are an affine function of the local stripe's index. A chunk's positions are therefore three
// integers, and the mask between any Q chunk and any KV chunk, of any layout, with a cached prefix or a
// sliding window, is two of these and the window:
//
//     visible(q, k)  ⇔  0 ≤ d  and  (window = 0  or  d < window),  d = first_q + position(q) − position(k)
//
// where first_q tokens stand before the first query: a cached prefix, whose keys are dealt with the others.
//
// Positions rise strictly with the slot, so whole tiles are classified by their corners:
//
//           keys →          y<x whole, y=x by the stripe's own offset, y>x hidden
//     q  [ W W P . . ]
//     ↓  [ W W W P . ]      W whole   P partial (masked per element)   . hidden (never loaded)
//        [ P W W W P ]      the lower-left P is the sliding window's diagonal
#ifndef MESHFILL_KERNELS_BAND_H_
#define MESHFILL_KERNELS_BAND_H_

#include <cstdint>

namespace meshfill {

// Absolute token positions of a chunk's slots: that of slot s is
// (base + stride · ⌊s / width⌋) · width + s mod width.
struct SlotPositions {
  int64_t base = 0;    // stripe index of local stripe 0
  int64_t stride = 1;  // stripes between neighbouring local stripes; ≥ 1
  int64_t width = 1;   // tokens in a stripe; ≥ 1

  constexpr int64_t At(int64_t slot) const { return (base + stride * (slot / width)) * width + slot % width; }
  bool operator==(const SlotPositions&) const = default;
};

enum class TileVisibility { kHidden, kPartial, kWhole };

struct Band {
  SlotPositions q;
  SlotPositions k;
  int64_t window = 0;   // tokens a query sees, itself included; 0: no window
  int64_t first_q = 0;  // position of the token that q counts from; ≥ 0

  constexpr bool Visible(int64_t q_slot, int64_t k_slot) const {
    const int64_t distance = first_q + q.At(q_slot) - k.At(k_slot);
    return distance >= 0 && (window == 0 || distance < window);
  }

  // Visibility of the non-empty tile [q_begin, q_end) × [k_begin, k_end) of local slots. kPartial may be
  // answered for a tile that happens to be whole or hidden; never the reverse.
  constexpr TileVisibility Classify(int64_t q_begin, int64_t q_end, int64_t k_begin, int64_t k_end) const {
    const int64_t nearest = first_q + q.At(q_begin) - k.At(k_end - 1);   // smallest distance in the tile
    const int64_t farthest = first_q + q.At(q_end - 1) - k.At(k_begin);  // largest distance in the tile
    if (farthest < 0 || (window != 0 && nearest >= window)) return TileVisibility::kHidden;
    if (nearest >= 0 && (window == 0 || farthest < window)) return TileVisibility::kWhole;
    return TileVisibility::kPartial;
  }

  bool operator==(const Band&) const = default;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_BAND_H_
