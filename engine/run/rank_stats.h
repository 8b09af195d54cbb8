// What one rank did and waited for during a run; the source of comm wait, overlap and bytes in every report.
#ifndef MESHFILL_ENGINE_RUN_RANK_STATS_H_
#define MESHFILL_ENGINE_RUN_RANK_STATS_H_

#include <cstdint>

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

  // What the rank did in another run, too.
  RankStats& operator+=(const RankStats& other) {
    attention_seconds += other.attention_seconds;
    block_seconds += other.block_seconds;
    merge_seconds += other.merge_seconds;
    wait_seconds += other.wait_seconds;
    total_seconds += other.total_seconds;
    sent += other.sent;
    blocks += other.blocks;
    return *this;
  }

  double comm_wait_seconds() const { return wait_seconds.total(); }
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_RANK_STATS_H_
