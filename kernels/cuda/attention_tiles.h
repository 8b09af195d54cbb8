// What a CTA of the attention kernels computes: the tiles of a block, their order over the CTAs, and the keys
// that a tile needs. Plain integer arithmetic in 32 bits, the same on host and device.
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

namespace meshfill {

// SlotPositions with positions below 2^31.
struct DeviceSlots {
  uint32_t base;
  uint32_t stride;
  uint32_t width;

  static constexpr DeviceSlots From(const SlotPositions& slots) {
    constexpr int64_t kLargest = (int64_t{1} << 31) - 1;  // larger strides and widths are never stepped over
    return {static_cast<uint32_t>(std::min(slots.base, kLargest)),
            static_cast<uint32_t>(std::min(slots.stride, kLargest)),
            static_cast<uint32_t>(std::min(slots.width, kLargest))};
  }
  constexpr uint32_t At(uint32_t slot) const {
    return (base + stride * (slot / width)) * width + slot % width;
  }

  // How many of the slots [0, tokens) stand before `position`.
  constexpr uint32_t Before(uint32_t position, uint32_t tokens) const {
    const uint32_t stripe = position / width;
    if (stripe < base) return 0;
    const uint32_t stripes = stripe - base;
    const uint32_t whole_stripes = (stripes + stride - 1) / stride;  // at most `stripes`: no overflow below
    const uint32_t in_last_stripe = stripes % stride == 0 ? position % width : 0;
    return std::min(whole_stripes * width + in_last_stripe, tokens);
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
  uint32_t group;     // query heads for each KV head
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
  // For the rows that pad the last tile, too.
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

template <uint32_t kRows>
constexpr uint32_t QueryTiles(const BlockShape& shape) {
  return (shape.q_tokens + kRows - 1) / kRows * shape.q_heads;
}

// The index-th tile. The heads of a section stand side by side, so that the CTAs at work share keys in L2.
// The last queries see the most keys: from the longest tiles to the shortest in the last section, to and fro
// in those before it, so that neighbours in this order are alike in work and the shortest tiles come last.
template <uint32_t kRows>
constexpr QueryTile TileAt(const BlockShape& shape, uint32_t index) {
  const uint32_t tiles_per_head = (shape.q_tokens + kRows - 1) / kRows;
  const uint32_t section = index / (shape.section_heads * tiles_per_head);
  const uint32_t last_section = (shape.q_heads - 1) / shape.section_heads;
  const uint32_t first_head = section * shape.section_heads;
  const uint32_t heads = std::min(shape.section_heads, shape.q_heads - first_head);
  const uint32_t rest = index - first_head * tiles_per_head;
  const uint32_t step = rest / heads;
  const bool longest_first = (last_section - section) % 2 == 0;
  return {first_head + rest % heads, (longest_first ? tiles_per_head - 1 - step : step) * kRows};
}

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
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_TILES_H_
