// What one rank did and waited for during a run; the source of comm wait, overlap and bytes in every report.
#ifndef MESHFILL_ENGINE_RUN_RANK_STATS_H_
#define MESHFILL_ENGINE_RUN_RANK_STATS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/mesh/traffic.h"
#include "engine/plan/plan.h"

namespace meshfill {

struct RankStats {
  double attention_seconds = 0;     // wall time inside attention, waits included, over all layers
  double block_seconds = 0;         // attention_seconds spent on blocks
  double merge_seconds = 0;         // attention_seconds spent on merges, and on reordering for head groups
  PerTraffic<double> wait_seconds;  // comm wait: the thread stands still for a message
  double total_seconds = 0;         // wall time of the rank's run
  CommBytes sent;
  int64_t blocks = 0;  // attention blocks computed
  // [layers, experts]: how many of the rank's tokens the routers sent to each expert; empty: there are none.
  std::vector<int64_t> tokens_per_expert;

  // What the rank did in another run, too.
  RankStats& operator+=(const RankStats& other) {
    attention_seconds += other.attention_seconds;
    block_seconds += other.block_seconds;
    merge_seconds += other.merge_seconds;
    wait_seconds += other.wait_seconds;
    total_seconds += other.total_seconds;
    sent += other.sent;
    blocks += other.blocks;
    tokens_per_expert.resize(std::max(tokens_per_expert.size(), other.tokens_per_expert.size()));
    for (size_t i = 0; i < other.tokens_per_expert.size(); ++i) {
      tokens_per_expert[i] += other.tokens_per_expert[i];
    }
    return *this;
  }

  double comm_wait_seconds() const { return wait_seconds.total(); }
};

// The part of what a rank did that is one prompt's, where several share a pass: `share` of 1. Without the
// experts' tokens.
inline RankStats PartOf(const RankStats& stats, double share) {
  RankStats part;
  part.attention_seconds = share * stats.attention_seconds;
  part.block_seconds = share * stats.block_seconds;
  part.merge_seconds = share * stats.merge_seconds;
  part.total_seconds = share * stats.total_seconds;
  for (const Traffic traffic : kPrefillTraffics) {
    part.wait_seconds[traffic] = share * stats.wait_seconds[traffic];
  }
  return part;
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_RANK_STATS_H_
