#include "engine/plan/plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace meshfill {

int Plan::SeatOf(int rank) const {
  return placement.seat_of_rank.empty() ? rank : placement.seat_of_rank[rank];
}

int Plan::RankAt(int seat) const {
  if (placement.seat_of_rank.empty()) return seat;
  const auto& seats = placement.seat_of_rank;
  return static_cast<int>(std::find(seats.begin(), seats.end(), seat) - seats.begin());
}

std::string PlanShape::DebugString() const {
  return absl::StrCat(tile.DebugString(), kv_inner == 0 ? "" : absl::StrCat(" in KV rings of ", kv_inner),
                      ", ", heads, heads == 1 ? " head group, " : " head groups, ", layout.DebugString(),
                      ", partial outputs in ", DTypeName(partial_dtype),
                      cached_tokens == 0 ? "" : absl::StrCat(", after ", cached_tokens, " cached tokens"),
                      exchanges() == 1 ? "" : absl::StrCat(", exchanged by ", exchange_tokens, " tokens"));
}

std::string Plan::DebugString() const {
  return absl::StrCat(PlanShape::DebugString(), ", ",
                      placement.name.empty() ? "" : absl::StrCat(placement.name, ", "), schedule.steps.size(),
                      " steps");
}

}  // namespace meshfill
