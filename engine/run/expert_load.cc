#include "engine/run/expert_load.h"

#include <algorithm>
#include <numeric>

namespace meshfill {

std::vector<ExpertLoad> ExpertLoadsOf(std::span<const RankStats> ranks, int layers, int experts) {
  std::vector<ExpertLoad> loads;
  std::vector<double> tokens(experts);
  for (int layer = 0; layer < layers; ++layer) {
    std::fill(tokens.begin(), tokens.end(), 0);
    for (const RankStats& rank : ranks) {
      if (std::ssize(rank.tokens_per_expert) != int64_t{layers} * experts) continue;
      const auto of_layer = rank.tokens_per_expert.begin() + int64_t{layer} * experts;
      std::transform(tokens.begin(), tokens.end(), of_layer, tokens.begin(),
                     [](double sum, int64_t count) { return sum + static_cast<double>(count); });
    }
    const double all = std::accumulate(tokens.begin(), tokens.end(), 0.0);
    if (all == 0) continue;
    loads.push_back({.layer = layer,
                     .imbalance = *std::max_element(tokens.begin(), tokens.end()) * experts / all,
                     .idle = static_cast<double>(std::count(tokens.begin(), tokens.end(), 0.0)) / experts});
  }
  return loads;
}

}  // namespace meshfill
