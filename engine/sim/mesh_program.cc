#include "engine/sim/mesh_program.h"

#include <utility>

#include "engine/schedule/schedule_walk.h"
#include "engine/sim/chunk_buffers.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/mesh_rings.h"

namespace meshfill::sim {
namespace {

class ForwardBuilder : public ScheduleVisitor {
 public:
  ForwardBuilder(const AttentionJob& job, int heads, const Schedule& schedule, Buffers buffers)
      : schedule_(schedule),
        groups_(job, heads, schedule.tile.ranks()),
        builder_(groups_.ranks()),
        ring_(schedule.tile.a == 1),
        keep_q_(buffers == Buffers::kKeep),
        keep_kv_(keep_q_ && !ring_) {}

  RankProgram Run() && {
    const ChunkBytes& share = groups_.share();
    const ChunkBytes& chunk = groups_.chunk();
    if (groups_.ranks() > schedule_.tile.ranks()) {
      builder_.Take(share.q + share.kv + chunk.q + chunk.kv);
      groups_.Exchange(builder_, {chunk.q, groups_.k_bytes(), groups_.k_bytes()});
      builder_.Give(share.q + share.kv + chunk.q + chunk.kv);
    }
    RunMesh();
    if (groups_.ranks() > schedule_.tile.ranks()) {
      builder_.Take(2 * chunk.o_finished);  // one copy is sent, one arrives
      groups_.Exchange(builder_, {chunk.o_finished});
      builder_.Give(2 * chunk.o_finished);
    }
    return std::move(builder_).Build();
  }

  // Visits the walk.
  void Start(const Transfer& transfer) {
    const int64_t bytes = BytesOf(transfer.traffic);
    builder_.Take(bytes);
    if (transfer.traffic == Traffic::kO) {  // the row as it is sent, and the one that arrives
      builder_.Give(groups_.chunk().o_state);
      builder_.Take(bytes);
    }
    builder_.Start(ChannelOf(transfer), bytes);
  }

  void Block(BlockIndex, RowState row) {
    TakeState(row);
    builder_.Compute(groups_.BlockFlops(Pass::kForward), 1);
  }

  void End(const Transfer& transfer, RowState row) {
    builder_.Wait(ChannelOf(transfer));
    if (transfer.traffic != Traffic::kO) return;
    TakeState(row);  // merged into its row
    builder_.Give(2 * groups_.chunk().o);
  }

  void FreeQ(int) {
    if (!keep_q_) builder_.Give(groups_.chunk().q);
  }
  void FreeKv(int) {
    if (!keep_kv_) builder_.Give(groups_.chunk().kv);
  }

 private:
  void RunMesh() {
    const ChunkBytes& chunk = groups_.chunk();
    const auto [a, b] = schedule_.tile;
    const MeshRings rings = MeshRingsOf(groups_, schedule_.tile, schedule_.kv_inner);
    channels_[Traffic::kQ] = builder_.AddChannel(Traffic::kQ, rings.q_from);
    channels_[Traffic::kKv] = builder_.AddChannel(Traffic::kKv, rings.kv_from);
    channels_[Traffic::kO] = builder_.AddChannel(Traffic::kO, rings.q_from);
    if (schedule_.kv_inner != 0) outer_channel_ = builder_.AddChannel(Traffic::kKv, rings.kv_outer_from);
    // A ring reuses no KV chunk: it keeps the caller's own, and one at a time.
    if (keep_q_ && ring_) builder_.Take(chunk.kv);
    builder_.Take(chunk.q);
    builder_.Take(chunk.kv);
    Walk(schedule_, *this);
    if (keep_q_) builder_.Give(a * chunk.q);
    if (keep_kv_) builder_.Give(b * chunk.kv);
    builder_.Give(chunk.o_state);  // O#0
    if (keep_q_ && ring_) builder_.Give(chunk.kv);
  }

  int ChannelOf(const Transfer& transfer) const {
    return transfer.ring == Ring::kKvOuter ? outer_channel_ : channels_[transfer.traffic];
  }

  int64_t BytesOf(Traffic traffic) const {
    if (traffic == Traffic::kQ) return groups_.chunk().q;
    return traffic == Traffic::kKv ? groups_.chunk().kv : groups_.chunk().o;
  }

  // A row's accumulator, with its first block or the first partial output that arrives for it.
  void TakeState(RowState row) {
    if (row == RowState::kEmpty) builder_.Take(groups_.chunk().o_state);
  }

  const Schedule& schedule_;
  const HeadGroups groups_;
  ProgramBuilder builder_;
  const bool ring_;
  const bool keep_q_;
  const bool keep_kv_;
  PerTraffic<int> channels_;
  int outer_channel_ = 0;  // KV, from one inner ring to the next
};

class BackwardBuilder {
 public:
  BackwardBuilder(const AttentionJob& job, int heads, const BackwardSchedule& schedule)
      : schedule_(schedule), groups_(job, heads, schedule.tile.ranks()), builder_(groups_.ranks()) {}

  RankProgram Run() && {
    const ChunkBytes& share = groups_.share();
    const ChunkBytes& chunk = groups_.chunk();
    if (groups_.ranks() > schedule_.tile.ranks()) {
      builder_.Take(share.odoq + share.kv + chunk.odoq + chunk.kv);
      groups_.Exchange(builder_, {chunk.odoq, groups_.k_bytes(), groups_.k_bytes()});
      builder_.Give(share.odoq + share.kv + chunk.odoq + chunk.kv);
    }
    RunMesh();
    if (groups_.ranks() > schedule_.tile.ranks()) {
      builder_.Take(2 * (chunk.dq + chunk.dkv));
      groups_.Exchange(builder_, {chunk.dq, chunk.dkv});
      builder_.Give(2 * (chunk.dq + chunk.dkv));
    }
    return std::move(builder_).Build();
  }

 private:
  // Every gradient accumulates from the first block on, until it is sent.
  void RunMesh() {
    const auto [a, b] = schedule_.tile;
    const ChunkBytes& chunk = groups_.chunk();
    const MeshRings rings = MeshRingsOf(groups_, schedule_.tile);
    const int odoq_channel = builder_.AddChannel(Traffic::kQ, rings.q_from);
    const int kv_channel = builder_.AddChannel(Traffic::kKv, rings.kv_from);
    const int dq_channel = builder_.AddChannel(Traffic::kDq, rings.q_from);
    const int dkv_channel = builder_.AddChannel(Traffic::kDkv, rings.kv_from);
    ChunkBuffers odoq(builder_, chunk.odoq, a, b, /*keep=*/false);
    ChunkBuffers kv(builder_, chunk.kv, b, a, /*keep=*/false);
    builder_.Take(a * chunk.dq + b * chunk.dkv);
    for (const Step& step : schedule_.steps) {
      if (step.comm == Traffic::kQ) {
        odoq.StartReceive();
        builder_.Start(odoq_channel, chunk.odoq);
      }
      if (step.comm == Traffic::kKv) {
        kv.StartReceive();
        builder_.Start(kv_channel, chunk.kv);
      }
      if (step.comm == Traffic::kDq) StartGradient(dq_channel, chunk.dq);
      if (step.comm == Traffic::kDkv) StartGradient(dkv_channel, chunk.dkv);
      for (const auto [u, v] : step.blocks) {
        builder_.Compute(groups_.BlockFlops(Pass::kBackward), 1);
        odoq.Use(u);
        kv.Use(v);
      }
      if (step.comm == Traffic::kQ) {
        builder_.Wait(odoq_channel);
        odoq.EndReceive();
      }
      if (step.comm == Traffic::kKv) {
        builder_.Wait(kv_channel);
        kv.EndReceive();
      }
      if (step.comm == Traffic::kDq) EndGradient(dq_channel, chunk.dq);
      if (step.comm == Traffic::kDkv) EndGradient(dkv_channel, chunk.dkv);
    }
    builder_.Give(chunk.dq + chunk.dkv);  // dQ#0 and dKV#0
  }

  void StartGradient(int channel, int64_t bytes) {
    builder_.Take(bytes);  // the one that arrives
    builder_.Start(channel, bytes);
  }

  void EndGradient(int channel, int64_t bytes) {
    builder_.Wait(channel);
    builder_.Give(2 * bytes);  // the one sent, and the one merged
  }

  const BackwardSchedule& schedule_;
  const HeadGroups groups_;
  ProgramBuilder builder_;
};

}  // namespace

RankProgram MeshForwardProgram(const AttentionJob& job, int heads, const Schedule& schedule,
                               Buffers buffers) {
  return ForwardBuilder(job, heads, schedule, buffers).Run();
}

RankProgram MeshBackwardProgram(const AttentionJob& job, int heads, const BackwardSchedule& schedule) {
  return BackwardBuilder(job, heads, schedule).Run();
}

}  // namespace meshfill::sim
