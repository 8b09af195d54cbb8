// What a CTA of the attention kernels computes: the tiles of a block, their order over the CTAs, and the keys
// that a tile needs. Plain integer arithmetic in 32 bits, the same on host and device, and no division by
// what only a launch knows (divisor.h): the tensor cores stand still while a tile begins.
//
// Positions rise with the slot, so a query sees one range of key slots, and both its ends rise with the
// query. A tile of queries therefore needs one run of key tiles, and masks at most the two ends of it:
//
//            keys →    begin                              end
//     first query      |#######################            |
//                      |   #########################       |
//     last query       |       ############################|
//     key tiles      | P   | P   | W   | W   | W   | P   | P   |
//
// P is masked per element, W is whole, and no other tiles are loaded.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_TILES_H_
#define MESHFILL_KERNELS_CUDA_ATTENTION_TILES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/band.h"
#include "kernels/cuda/divisor.h"

namespace meshfill {

// SlotPositions with positions below 2^31.
struct DeviceSlots {
  uint32_t base;
  Divisor stride;
  Divisor width;

  static constexpr DeviceSlots From(const SlotPositions& slots) {
    constexpr int64_t kLargest = (int64_t{1} << 31) - 1;  // larger strides and widths are never stepped over
    return {static_cast<uint32_t>(std::min(slots.base, kLargest)),
            Divisor(static_cast<uint32_t>(std::min(slots.stride, kLargest))),
            Divisor(static_cast<uint32_t>(std::min(slots.width, kLargest)))};
  }
  constexpr uint32_t At(uint32_t slot) const {
    const uint32_t stripe = width.Quotient(slot), in_stripe = slot - stripe * width.value();
    return (base + stride.value() * stripe) * width.value() + in_stripe;
  }

  // How many of the slots [0, tokens) stand before `position`.
  constexpr uint32_t Before(uint32_t position, uint32_t tokens) const {
    const uint32_t stripe = width.Quotient(position), in_stripe = position - stripe * width.value();
    if (stripe < base) return 0;
    const uint32_t past = stride.Quotient(stripe - base);  // whole stripes of the chunk, at most `stripe`
    const uint32_t rest = stripe - base - past * stride.value();
    // `position` is in the chunk's next stripe, or behind it.
    const uint32_t in_next = rest == 0 ? in_stripe : width.value();
    return std::min(past * width.value() + in_next, tokens);
  }
};

// Key slots [begin, end); empty where begin ≥ end.
struct KeySlots {
  uint32_t begin;
  uint32_t end;

  constexpr bool Contains(uint32_t slot) const { return slot - begin < size(); }
  constexpr uint32_t size() const { return end > begin ? end - begin : 0; }
};

// The integers of one block. Copied to the device with each launch.
struct BlockShape {
  uint32_t q_tokens;
  uint32_t k_tokens;
  uint32_t q_heads;
  Divisor group;      // query heads for each KV head
  uint32_t head_dim;  // a multiple of 8
  uint32_t window;    // 0: none
  uint32_t first_q;   // position of the token that q_slots count from
  DeviceSlots q_slots;
  DeviceSlots k_slots;
  uint32_t section_heads;  // query heads whose keys and values share the L2 cache

  constexpr KeySlots VisibleKeys(uint32_t q_slot) const {
    const uint32_t past = first_q + q_slots.At(q_slot) + 1;  // the first position that is hidden
    return {window == 0 || past <= window ? 0 : k_slots.Before(past - window, k_tokens),
            k_slots.Before(past, k_tokens)};
  }
  constexpr uint32_t kv_heads() const { return group.Quotient(q_heads); }
  constexpr uint32_t KvHead(uint32_t q_head) const { return group.Quotient(q_head); }
  // The keys that a row sees; none for the rows that pad the last tile.
  constexpr KeySlots VisibleKeysOrNone(uint32_t q_slot) const {
    return q_slot < q_tokens ? VisibleKeys(q_slot) : KeySlots{0, 0};
  }
};

// Query heads in one section: those of as many KV heads as fit half of L2, at least one.
constexpr uint32_t SectionHeads(uint32_t q_heads, uint32_t group, uint64_t kv_bytes_per_head,
                                uint64_t l2_bytes) {
  const uint64_t kv_heads = std::max<uint64_t>(1, l2_bytes / 2 / std::max<uint64_t>(1, kv_bytes_per_head));
  return static_cast<uint32_t>(std::min<uint64_t>(q_heads, kv_heads * group));
}

// kRows queries of one head.
struct QueryTile {
  uint32_t head;
  uint32_t begin;  // first q slot
};

// The tiles of a block of at least one query, in the order of the CTAs. Prepared by the host.
//
// The heads of a section stand side by side, so that the CTAs at work share keys in L2. The last queries see
// the most keys: from the longest tiles to the shortest in the last section, to and fro in those before it,
// so that neighbours in this order are alike in work and the shortest tiles come last.
template <uint32_t kRows>
class QueryTiles {
 public:
  constexpr explicit QueryTiles(const BlockShape& shape)
      : per_head_((shape.q_tokens + kRows - 1) / kRows),
        count_(per_head_ * shape.q_heads),
        last_section_((shape.q_heads - 1) / shape.section_heads),
        section_heads_(shape.section_heads),
        heads_of_last_(shape.q_heads - last_section_ * shape.section_heads),
        section_tiles_(shape.section_heads * per_head_) {}

  constexpr uint32_t count() const { return count_; }
  constexpr QueryTile At(uint32_t index) const {
    const uint32_t section = section_tiles_.Quotient(index);
    const uint32_t rest = index - section * section_tiles_.value();
    const Divisor heads = section == last_section_ ? heads_of_last_ : section_heads_;
    const uint32_t step = heads.Quotient(rest);
    const bool longest_first = (last_section_ - section) % 2 == 0;
    return {section * section_heads_.value() + rest - step * heads.value(),
            (longest_first ? per_head_ - 1 - step : step) * kRows};
  }

 private:
  uint32_t per_head_;
  uint32_t count_;
  uint32_t last_section_;
  Divisor section_heads_;
  Divisor heads_of_last_;
  Divisor section_tiles_;
};

// Persistent CTAs take tiles in rounds, to and fro, so that no CTA has the longest tile of every round:
//
//     CTA       0  1  2  3
//     round 0   0  1  2  3
//     round 1   7  6  5  4
//     round 2   8  9  …
constexpr uint32_t TileOfRound(uint32_t round, uint32_t cta, uint32_t ctas) {
  return round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
}

// The key tiles [begin, end) of kKeys keys that a query tile needs, and the keys that all its queries see.
template <uint32_t kRows, uint32_t kKeys>
struct KeyTiles {
  uint32_t begin = 0;
  uint32_t end = 0;
  KeySlots whole = {};

  constexpr KeyTiles(const BlockShape& shape, const QueryTile& tile) {
    const KeySlots first = shape.VisibleKeys(tile.begin);
    const KeySlots last = shape.VisibleKeys(std::min(tile.begin + kRows, shape.q_tokens) - 1);
    whole = {last.begin, first.end};
    if (first.begin >= last.end) return;
    begin = first.begin / kKeys;
    end = (last.end + kKeys - 1) / kKeys;
  }
  constexpr bool Empty() const { return begin == end; }
  constexpr bool Whole(uint32_t key_tile) const {
    return key_tile * kKeys >= whole.begin && (key_tile + 1) * kKeys <= whole.end;
  }
  // The first of them that is whole, where one is: those up to the last whole one are, too.
  constexpr uint32_t FirstWhole() const { return std::max(begin, (whole.begin + kKeys - 1) / kKeys); }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_TILES_H_
