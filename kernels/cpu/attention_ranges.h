// The keys that a query sees, as a range of slots. Positions rise strictly with the slot, so what a band
// leaves visible of a KV chunk is one range for each query, found without a search; both its ends rise with
// the query's slot.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_RANGES_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_RANGES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/band.h"

namespace meshfill {

// Key slots [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
  bool operator==(const KeyRange&) const = default;
};

// How many of the slots [0, tokens) stand before `position`.
constexpr int64_t SlotsBefore(const SlotPositions& slots, int64_t position, int64_t tokens) {
  const int64_t stripe = position / slots.width;
  if (position <= 0 || stripe < slots.base) return 0;
  const int64_t stripes = stripe - slots.base;
  const int64_t whole_stripes = (stripes + slots.stride - 1) / slots.stride;
  const int64_t in_last_stripe = stripes % slots.stride == 0 ? position % slots.width : 0;
  return std::min(whole_stripes * slots.width + in_last_stripe, tokens);
}

constexpr KeyRange VisibleKeys(const Band& band, int64_t q_slot, int64_t k_tokens) {
  const int64_t position = band.first_q + band.q.At(q_slot);
  return {.begin = band.window == 0 ? 0 : SlotsBefore(band.k, position - band.window + 1, k_tokens),
          .end = SlotsBefore(band.k, position + 1, k_tokens)};
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_RANGES_H_
