#include "engine/sim/mesh_lanes.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "engine/sim/chunk_buffers.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/lockstep.h"
#include "engine/sim/mesh_rings.h"

namespace meshfill::sim {
namespace {

// Along one ring: receives, then what is returned. Rows of the tile for the Q lane, columns for the KV lane.
struct Lane {
  int count = 1;  // rows or columns
  int64_t receive_bytes = 0;
  int64_t return_bytes = 0;  // 0: nothing is returned
  int64_t state_bytes = 0;   // one accumulator of what is returned
  double receive_seconds = 0;
  double return_seconds = 0;
  int receive_channel = 0;
  int return_channel = 0;

  int started = 0;             // messages
  double arrives_at = -1;      // when the message under way arrives; negative: none is
  std::vector<int> left = {};  // [count]: blocks of each row or column that are not computed
  std::vector<bool> touched = {};

  int receives() const { return count - 1; }
  int messages() const { return return_bytes > 0 ? 2 * (count - 1) : count - 1; }
  bool receiving() const { return started <= receives(); }  // whether the last message started is a receive
  int first_unfinished() const {
    for (int index = 1; index < count; ++index) {
      if (left[index] > 0) return index;
    }
    return 0;
  }
};

class LanesBuilder {
 public:
  LanesBuilder(const AttentionJob& job, Pass pass, const PlacedMesh& mesh, const Cluster& cluster)
      : pass_(pass),
        tile_(mesh.tile),
        groups_(job, mesh.heads, mesh.tile.ranks()),
        builder_(groups_.ranks()),
        block_seconds_(groups_.BlockFlops(pass) / cluster.attention_flops_per_second +
                       cluster.block_overhead_seconds),
        computed_(tile_.a * tile_.b, false) {
    const ChunkBytes& chunk = groups_.chunk();
    const bool forward = pass == Pass::kForward;
    rows_ = {.count = tile_.a,
             .receive_bytes = forward ? chunk.q : chunk.odoq,
             .return_bytes = forward ? chunk.o : chunk.dq,
             .state_bytes = forward ? chunk.o_state : chunk.dq};
    columns_ = {.count = tile_.b,
                .receive_bytes = chunk.kv,
                .return_bytes = forward ? 0 : chunk.dkv,
                .state_bytes = forward ? 0 : chunk.dkv};
    const MeshRings rings = MeshRingsOf(groups_, tile_);
    Prepare(rows_, tile_.b, SpeedOf(rings.q_from, mesh.placement, cluster), cluster);
    Prepare(columns_, tile_.a, SpeedOf(rings.kv_from, mesh.placement, cluster), cluster);
    q_from_ = rings.q_from;
    kv_from_ = rings.kv_from;
  }

  RankProgram Run() && {
    const ChunkBytes& chunk = groups_.chunk();
    const bool forward = pass_ == Pass::kForward;
    groups_.Exchange(builder_, {rows_.receive_bytes, groups_.k_bytes(), groups_.k_bytes()});
    rows_.receive_channel = builder_.AddChannel(Traffic::kQ, q_from_);
    rows_.return_channel = builder_.AddChannel(forward ? Traffic::kO : Traffic::kDq, q_from_);
    columns_.receive_channel = builder_.AddChannel(Traffic::kKv, kv_from_);
    columns_.return_channel = builder_.AddChannel(Traffic::kDkv, kv_from_);
    RunMesh();
    if (forward) {
      groups_.Exchange(builder_, {chunk.o_finished});
    } else {
      groups_.Exchange(builder_, {chunk.dq, chunk.dkv});
    }
    return std::move(builder_).Build();
  }

 private:
  static void Prepare(Lane& lane, int blocks_each, const ChannelSpeed& speed, const Cluster& cluster) {
    lane.receive_seconds = speed.Seconds(cluster, static_cast<double>(lane.receive_bytes));
    lane.return_seconds = speed.Seconds(cluster, static_cast<double>(lane.return_bytes));
    lane.left.assign(lane.count, blocks_each);
    lane.touched.assign(lane.count, false);
  }

  void RunMesh() {
    ChunkBuffers q(builder_, rows_.receive_bytes, tile_.a, tile_.b, /*keep=*/false);
    ChunkBuffers kv(builder_, columns_.receive_bytes, tile_.b, tile_.a, /*keep=*/false);
    while (true) {
      while (Progress(rows_, q) || Progress(columns_, kv)) {
      }
      const BlockIndex block = NextBlock(q.here(), kv.here());
      if (block.u >= 0) {
        Compute(block);
        q.Use(block.u);
        kv.Use(block.v);
        continue;
      }
      const double next = std::min(rows_.arrives_at < 0 ? kNever : rows_.arrives_at,
                                   columns_.arrives_at < 0 ? kNever : columns_.arrives_at);
      if (next == kNever) break;
      now_ = next;
    }
    builder_.Give(rows_.state_bytes + columns_.state_bytes);  // the rank's own row and column
  }

  // Ends the lane's message if it is there by now, or starts the next one if that is possible. False:
  // neither.
  bool Progress(Lane& lane, ChunkBuffers& chunks) {
    if (lane.arrives_at >= 0) {
      if (lane.arrives_at > now_) return false;
      lane.arrives_at = -1;
      builder_.Wait(lane.receiving() ? lane.receive_channel : lane.return_channel);
      if (lane.receiving()) {
        chunks.EndReceive();
      } else {
        builder_.Give(lane.return_bytes + lane.state_bytes);  // merged, and sent
      }
      return true;
    }
    if (lane.started == lane.messages()) return false;
    if (lane.started < lane.receives()) {
      chunks.StartReceive();
      builder_.Start(lane.receive_channel, lane.receive_bytes);
      lane.arrives_at = now_ + lane.receive_seconds;
    } else {
      if (lane.left[lane.started - lane.receives() + 1] > 0) return false;
      builder_.Take(lane.return_bytes);
      builder_.Start(lane.return_channel, lane.return_bytes);
      lane.arrives_at = now_ + lane.return_seconds;
    }
    ++lane.started;
    return true;
  }

  void Compute(BlockIndex block) {
    builder_.Compute(groups_.BlockFlops(pass_), 1);
    now_ += block_seconds_;
    computed_[block.u * tile_.b + block.v] = true;
    Touch(rows_, block.u);
    Touch(columns_, block.v);
  }

  void Touch(Lane& lane, int index) {
    --lane.left[index];
    if (lane.touched[index]) return;
    lane.touched[index] = true;
    builder_.Take(lane.state_bytes);
  }

  // Algorithm 3's choice: the next block along the line whose return leaves sooner for its cost. In the
  // forward pass only rows return anything. {-1, -1}: no block has its chunks.
  BlockIndex NextBlock(int q_here, int kv_here) const {
    const double by_row = rows_.return_seconds * columns_.left[columns_.first_unfinished()];
    const double by_column = columns_.return_seconds * rows_.left[rows_.first_unfinished()];
    const bool column_first =
        columns_.return_bytes > 0 && tile_.b > 1 && (tile_.a == 1 || by_row < by_column);
    const int outer_here = column_first ? kv_here : q_here;
    const int inner_here = column_first ? q_here : kv_here;
    // Line 0 of either is the rank's own and comes last.
    for (int i = 1; i <= outer_here; ++i) {
      const int outer = i % outer_here;
      if ((column_first ? columns_ : rows_).left[outer] == 0) continue;
      for (int j = 1; j <= inner_here; ++j) {
        const int inner = j % inner_here;
        const BlockIndex block{.u = column_first ? inner : outer, .v = column_first ? outer : inner};
        if (!computed_[block.u * tile_.b + block.v]) return block;
      }
    }
    return {.u = -1, .v = -1};
  }

  static constexpr double kNever = std::numeric_limits<double>::infinity();

  const Pass pass_;
  const Tile tile_;
  const HeadGroups groups_;
  ProgramBuilder builder_;
  const double block_seconds_;
  Lane rows_;
  Lane columns_;
  std::vector<int> q_from_;
  std::vector<int> kv_from_;
  std::vector<bool> computed_;  // [a, b]
  double now_ = 0;
};

}  // namespace

RankProgram MeshLanesProgram(const AttentionJob& job, Pass pass, const PlacedMesh& mesh,
                             const Cluster& cluster) {
  return LanesBuilder(job, pass, mesh, cluster).Run();
}

}  // namespace meshfill::sim
