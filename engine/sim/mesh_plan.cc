#include "engine/sim/mesh_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/schedule/optimal_schedule.h"
#include "engine/schedule/schedule.h"
#include "engine/sim/backward_schedule.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/lockstep.h"
#include "engine/sim/mesh_rings.h"

namespace meshfill::sim {
namespace {

// How many blocks hide each of a pass's messages.
class Costs {
 public:
  Costs(const HeadGroups& groups, Pass pass, const MeshPlan& plan, const Cluster& cluster)
      : cluster_(cluster),
        block_seconds_(groups.BlockFlops(pass) / cluster.attention_flops_per_second +
                       cluster.block_overhead_seconds),
        most_(plan.tile.ranks()) {
    const MeshRings rings = MeshRingsOf(groups, plan.tile);
    q_speed_ = SpeedOf(rings.q_from, plan.placement, cluster);
    kv_speed_ = SpeedOf(rings.kv_from, plan.placement, cluster);
  }

  int AlongQ(int64_t bytes) const { return Blocks(q_speed_, bytes); }
  int AlongKv(int64_t bytes) const { return Blocks(kv_speed_, bytes); }

 private:
  int Blocks(const ChannelSpeed& speed, int64_t bytes) const {
    const double seconds = speed.Seconds(cluster_, static_cast<double>(bytes));
    return static_cast<int>(std::clamp(std::ceil(seconds / block_seconds_), 1.0, static_cast<double>(most_)));
  }

  const Cluster& cluster_;
  const double block_seconds_;
  const int most_;
  ChannelSpeed q_speed_;
  ChannelSpeed kv_speed_;
};

const char* SchedulingName(Scheduling scheduling) {
  switch (scheduling) {
    case Scheduling::kGreedy:
      return "";
    case Scheduling::kLeastTime:
      return ", least time";
    case Scheduling::kRowsFirst:
      return ", rows first";
    case Scheduling::kColumnsFirst:
      return ", columns first";
  }
  return "";
}

BackwardOrder OrderOf(Scheduling scheduling) {
  if (scheduling == Scheduling::kRowsFirst) return BackwardOrder::kRowsFirst;
  if (scheduling == Scheduling::kColumnsFirst) return BackwardOrder::kColumnsFirst;
  return BackwardOrder::kAlternate;
}

}  // namespace

std::string MeshPlan::DebugString() const {
  std::string text = tile.DebugString();
  if (heads > 1) text = absl::StrCat(heads, "·", text);
  if (placement.name != "row-first") absl::StrAppend(&text, ", ", placement.name);
  absl::StrAppend(&text, SchedulingName(scheduling));
  return text;
}

RankProgram MeshProgram(const AttentionJob& job, Pass pass, const MeshPlan& plan, const Cluster& cluster,
                        Profile profile, Buffers buffers) {
  const HeadGroups groups(job, plan.heads, plan.tile.ranks());
  const Cluster profiled = profile == Profile::kIsolated ? WithoutSharing(cluster) : cluster;
  const Costs costs(groups, pass, plan, profiled);
  const ChunkBytes& chunk = groups.chunk();
  if (pass == Pass::kForward) {
    const OverlapCosts overlap{
        .c_q = costs.AlongQ(chunk.q), .c_kv = costs.AlongKv(chunk.kv), .c_o = costs.AlongQ(chunk.o)};
    const bool greedy = plan.scheduling == Scheduling::kGreedy;
    return MeshForwardProgram(
        job, plan.heads, greedy ? GreedySchedule(plan.tile, overlap) : OptimalSchedule(plan.tile, overlap),
        buffers);
  }
  return MeshBackwardProgram(job, plan.heads,
                             GreedyBackwardSchedule(plan.tile,
                                                    {.c_odoq = costs.AlongQ(chunk.odoq),
                                                     .c_kv = costs.AlongKv(chunk.kv),
                                                     .c_dq = costs.AlongQ(chunk.dq),
                                                     .c_dkv = costs.AlongKv(chunk.dkv)},
                                                    OrderOf(plan.scheduling)));
}

MeshPlan PaperMeshPlan(const AttentionJob& job, Pass pass, int ranks, const Cluster& cluster) {
  const Cluster profiled = WithoutSharing(cluster);
  MeshPlan best{.heads = 1, .tile = {.a = 1, .b = ranks}, .placement = RowFirst(ranks)};
  double best_seconds = std::numeric_limits<double>::infinity();
  for (const Tile tile : TilesOf(ranks)) {
    MeshPlan plan{.heads = 1, .tile = tile, .placement = RowFirst(ranks)};
    const double seconds = LockstepSeconds(MeshProgram(job, pass, plan, profiled), plan.placement, profiled);
    if (seconds < best_seconds) {
      best_seconds = seconds;
      best = std::move(plan);
    }
  }
  return best;
}

Cluster WithoutSharing(Cluster cluster) {
  cluster.node_bytes_per_second = Cluster::kUnshared;
  return cluster;
}

}  // namespace meshfill::sim
