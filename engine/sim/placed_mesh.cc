#include "engine/sim/placed_mesh.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "engine/plan/planner.h"
#include "engine/schedule/schedule.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/lockstep.h"
#include "kernels/return_if_error.h"

namespace meshfill::sim {
namespace {

constexpr int64_t kStripe = 1;  // chunks are even

// The planner knows dtypes, the simulator bytes.
DType DTypeOf(int bytes) { return bytes > 2 ? DType::kF32 : DType::kBf16; }

ModelShape ModelOf(const AttentionJob& job) {
  return {.layers = 1,
          .q_heads = job.q_heads,
          .kv_heads = job.kv_heads,
          .head_dim = job.head_dim,
          .context_tokens = job.tokens,
          .dtype = DTypeOf(job.wire.element)};
}

// The planner counts causal pairs: a full mask has twice as many.
PoolSpeed SpeedOf(const AttentionJob& job, const Cluster& cluster, int ranks) {
  constexpr double kAtOnce = std::numeric_limits<double>::infinity();
  const double rows_of_a_block = std::ceil(static_cast<double>(job.tokens) / ranks) * job.q_heads;
  PoolSpeed speed;
  speed.gemm_flops_per_second = kAtOnce;
  speed.merge_bytes_per_second = kAtOnce;
  speed.attention_flops_per_second = cluster.attention_flops_per_second * (job.causal ? 1 : 0.5);
  speed.block_row_seconds = cluster.block_overhead_seconds / rows_of_a_block;
  return speed;
}

OverlapCosts ForwardCosts(const AttentionJob& job, const PlacedMesh& mesh, const Cluster& cluster) {
  const int ranks = mesh.heads * mesh.tile.ranks();
  const Links links = LinksOf(TopologyOf(cluster, ranks), mesh.heads, mesh.tile, mesh.placement);
  const PlanShape shape = {
      .layout = TokenLayout::Make(LayoutKind::kStriped, ranks, job.tokens, kStripe).value(),
      .heads = mesh.heads,
      .tile = mesh.tile,
      .partial_dtype = DTypeOf(job.wire.partial),
      .links = links,
      .one_memory = false};
  return OverlapCostsOf(ModelOf(job), SpeedOf(job, cluster, ranks), shape);
}

// How many blocks hide each of the backward pass's messages.
BackwardCosts BackwardCostsOf(const AttentionJob& job, const PlacedMesh& mesh, const Cluster& cluster) {
  const HeadGroups groups(job, mesh.heads, mesh.tile.ranks());
  const Links links = LinksOf(TopologyOf(cluster, groups.ranks()), mesh.heads, mesh.tile, mesh.placement);
  const double block_seconds = groups.BlockFlops(Pass::kBackward) / cluster.attention_flops_per_second +
                               cluster.block_overhead_seconds;
  const auto blocks = [&](Traffic ring, int64_t bytes) {
    const double hidden_by = std::ceil(links[ring].Seconds(static_cast<double>(bytes)) / block_seconds);
    return static_cast<int>(std::clamp<double>(hidden_by, 1, mesh.tile.ranks()));
  };
  const ChunkBytes& chunk = groups.chunk();
  return {.c_odoq = blocks(Traffic::kQ, chunk.odoq),
          .c_kv = blocks(Traffic::kKv, chunk.kv),
          .c_dq = blocks(Traffic::kQ, chunk.dq),
          .c_dkv = blocks(Traffic::kKv, chunk.dkv)};
}

}  // namespace

std::string PlacedMesh::DebugString() const {
  std::string text = tile.DebugString();
  if (heads > 1) text = absl::StrCat(heads, "·", text);
  if (placement.name != "row-first") absl::StrAppend(&text, ", ", placement.name);
  if (kv_inner != 0) absl::StrAppend(&text, ", KV rings of ", kv_inner);
  return text;
}

RankProgram MeshProgram(const AttentionJob& job, Pass pass, const PlacedMesh& mesh, const Cluster& cluster,
                        Profile profile, Buffers buffers, BackwardOrder order) {
  const Cluster profiled = profile == Profile::kIsolated ? WithoutSharing(cluster) : cluster;
  if (pass == Pass::kForward) {
    const Schedule schedule = GreedySchedule(mesh.tile, ForwardCosts(job, mesh, profiled));
    return MeshForwardProgram(job, mesh.heads, schedule, buffers);
  }
  const BackwardCosts costs = BackwardCostsOf(job, mesh, profiled);
  return MeshBackwardProgram(job, mesh.heads, GreedyBackwardSchedule(mesh.tile, costs, order));
}

absl::StatusOr<Plan> MakeForwardPlan(const AttentionJob& job, int ranks, const Cluster& cluster) {
  auto choice = MakePlan(ModelOf(job), SpeedOf(job, cluster, ranks),
                         {.tokens = job.tokens,
                          .ranks = ranks,
                          .stripe = kStripe,
                          .partial_dtype = DTypeOf(job.wire.partial),
                          .one_memory = false,
                          .topology = TopologyOf(cluster, ranks),
                          .many_rings = true});
  RETURN_IF_ERROR(choice.status());
  Plan plan = std::move(choice->plan);
  if (plan.placement.seat_of_rank.empty()) plan.placement = RowFirst(ranks);
  return plan;
}

PlacedMesh PaperMesh(const AttentionJob& job, Pass pass, int ranks, const Cluster& cluster) {
  const Cluster profiled = WithoutSharing(cluster);
  PlacedMesh best{.heads = 1, .tile = {.a = 1, .b = ranks}, .placement = RowFirst(ranks)};
  double best_seconds = std::numeric_limits<double>::infinity();
  for (const Tile tile : TilesOf(ranks)) {
    PlacedMesh mesh{.heads = 1, .tile = tile, .placement = RowFirst(ranks)};
    const double seconds = LockstepSeconds(MeshProgram(job, pass, mesh, profiled), mesh.placement, profiled);
    if (seconds < best_seconds) {
      best_seconds = seconds;
      best = std::move(mesh);
    }
  }
  return best;
}

}  // namespace meshfill::sim
