#include "engine/plan/pack.h"

#include <algorithm>

namespace meshfill {

Pack::Pack(const PackRoom& room) : room_(room), ranks_(static_cast<size_t>(std::max(0, room.ranks))) {}

std::optional<int> Pack::Add(const PackShare& share) {
  if (share.tokens < 1) return std::nullopt;
  const auto has_room = [&](const Rank& rank) {
    return share.tokens <= room_.rank_tokens - rank.tokens && share.bytes <= room_.rank_bytes - rank.bytes;
  };
  Rank* best = nullptr;
  for (Rank& rank : ranks_) {
    if (has_room(rank) && (best == nullptr || rank.tokens < best->tokens)) best = &rank;
  }
  if (best == nullptr) return std::nullopt;
  best->tokens += share.tokens;
  best->bytes += share.bytes;
  best->added_seconds += share.added_seconds;
  least_seconds_ = std::max(least_seconds_, share.least_seconds);
  pass_seconds_ = std::max(pass_seconds_, share.pass_seconds);
  return static_cast<int>(best - ranks_.data());
}

double Pack::seconds() const {
  double longest = 0;
  for (const Rank& rank : ranks_) longest = std::max(longest, rank.added_seconds);
  return std::max(least_seconds_, pass_seconds_ + longest);
}

}  // namespace meshfill
