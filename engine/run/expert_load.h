// How evenly the routers of a prefill dealt its tokens to their experts.
//
//     layer 0, 4 experts of which 2 are used, 100 tokens
//     tokens per expert   90  60  50  0       Σ = 2 · 100: a token counts for each expert that it uses
//     imbalance           90 / 50 = 1.8       the mean is 50; at most experts / used = 2
//     idle                1 / 4
#ifndef MESHFILL_ENGINE_RUN_EXPERT_LOAD_H_
#define MESHFILL_ENGINE_RUN_EXPERT_LOAD_H_

#include <span>
#include <vector>

#include "engine/run/rank_stats.h"

namespace meshfill {

// Of one layer, all ranks together.
struct ExpertLoad {
  int layer;         // from 0
  double imbalance;  // tokens of the busiest expert over the mean of all: 1 (even) to experts / used
  double idle;       // share of the experts to which no token went
};

// Of each layer that has experts: a dense one has counted no tokens. Ranks whose counts are not of so many
// layers and experts are left out.
std::vector<ExpertLoad> ExpertLoadsOf(std::span<const RankStats> ranks, int layers, int experts);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_EXPERT_LOAD_H_
