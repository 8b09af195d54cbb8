#include "engine/plan/pack.h"

#include <algorithm>

#include "engine/plan/cost_model.h"

namespace meshfill {

PackShare PackShareOf(const ModelShape& model, const PoolSpeed& speed, const PartFactors& factors,
                      const Plan& plan, int64_t pass_bytes) {
  const Prediction& predicted = plan.predicted;
  const double pass = std::max(0.0, predicted.parts.fixed + factors.fixed_seconds) +
                      factors.products * PassSeconds(model, speed);
  return {.tokens = plan.layout.tokens(),
          .bytes = std::max<int64_t>(0, predicted.run_bytes - pass_bytes),
          .least_seconds = predicted.weight_seconds > 0 ? predicted.seconds : 0,
          .pass_seconds = pass,
          .added_seconds = std::max(0.0, predicted.seconds - predicted.weight_seconds - pass)};
}

int64_t LargestPackTokens(int64_t most, const std::function<bool(int64_t tokens)>& fits) {
  int64_t tokens = most;
  while (tokens > 1 && !fits(tokens)) tokens /= 2;
  return tokens > 1 ? tokens : 0;
}

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
