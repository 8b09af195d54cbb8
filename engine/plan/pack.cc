#include "engine/plan/pack.h"

#include <algorithm>

namespace meshfill {

Pack::Pack(const PackRoom& room)
    : rank_tokens_(room.rank_tokens), ranks_(static_cast<size_t>(std::max(0, room.ranks))) {}

std::optional<int> Pack::Add(const PackShare& share) {
  if (ranks_.empty() || share.tokens < 1) return std::nullopt;
  const auto rank = std::min_element(ranks_.begin(), ranks_.end(), [](const Rank& left, const Rank& right) {
    return left.tokens < right.tokens;
  });
  if (share.tokens > rank_tokens_ - rank->tokens) return std::nullopt;
  rank->tokens += share.tokens;
  rank->added_seconds += share.added_seconds;
  least_seconds_ = std::max(least_seconds_, share.least_seconds);
  pass_seconds_ = std::max(pass_seconds_, share.pass_seconds);
  return static_cast<int>(rank - ranks_.begin());
}

double Pack::seconds() const {
  double longest = 0;
  for (const Rank& rank : ranks_) longest = std::max(longest, rank.added_seconds);
  return std::max(least_seconds_, pass_seconds_ + longest);
}

}  // namespace meshfill
