#include "engine/sim/mesh_program.h"

#include <utility>
#include <vector>

#include "engine/sim/chunk_buffers.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/mesh_rings.h"

namespace meshfill::sim {
namespace {

class ForwardBuilder {
 public:
  ForwardBuilder(const AttentionJob& job, int heads, const Schedule& schedule, Buffers buffers)
      : schedule_(schedule),
        a_(schedule.tile.a),
        groups_(job, heads, schedule.tile.ranks()),
        builder_(groups_.ranks()),
        keep_(buffers == Buffers::kKeep),
        state_(a_, false) {}

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
      builder_.Take(2 * chunk.o_finished);  // as it is sent, and as it arrives
      groups_.Exchange(builder_, {chunk.o_finished});
      builder_.Give(2 * chunk.o_finished);
    }
    return std::move(builder_).Build();
  }

 private:
  void RunMesh() {
    const ChunkBytes& chunk = groups_.chunk();
    const MeshRings rings = MeshRingsOf(groups_, schedule_.tile);
    const int q_channel = builder_.AddChannel(Traffic::kQ, rings.q_from);
    const int kv_channel = builder_.AddChannel(Traffic::kKv, rings.kv_from);
    const int o_channel = builder_.AddChannel(Traffic::kO, rings.q_from);
    // A ring reuses no KV chunk: it keeps the caller's own, and one at a time.
    const bool ring = a_ == 1;
    if (keep_ && ring) builder_.Take(chunk.kv);
    ChunkBuffers q(builder_, chunk.q, a_, schedule_.tile.b, keep_);
    ChunkBuffers kv(builder_, chunk.kv, schedule_.tile.b, a_, keep_ && !ring);
    for (const Step& step : schedule_.steps) {
      if (step.comm == Traffic::kQ) {
        q.StartReceive();
        builder_.Start(q_channel, chunk.q);
      }
      if (step.comm == Traffic::kKv) {
        kv.StartReceive();
        builder_.Start(kv_channel, chunk.kv);
      }
      if (step.comm == Traffic::kO) StartSendO(o_channel);
      for (const auto [u, v] : step.blocks) {
        TakeState(u);
        builder_.Compute(groups_.BlockFlops(Pass::kForward), 1);
        q.Use(u);
        kv.Use(v);
      }
      if (step.comm == Traffic::kQ) {
        builder_.Wait(q_channel);
        q.EndReceive();
      }
      if (step.comm == Traffic::kKv) {
        builder_.Wait(kv_channel);
        kv.EndReceive();
      }
      if (step.comm == Traffic::kO) EndSendO(o_channel);
    }
    q.GiveKept();
    kv.GiveKept();
    builder_.Give(chunk.o_state);  // O#0
    if (keep_ && ring) builder_.Give(chunk.kv);
  }

  void StartSendO(int channel) {
    const ChunkBytes& chunk = groups_.chunk();
    builder_.Take(chunk.o);  // the row as it is sent
    builder_.Give(chunk.o_state);
    builder_.Take(chunk.o);  // the row that arrives
    builder_.Start(channel, chunk.o);
  }

  void EndSendO(int channel) {
    builder_.Wait(channel);
    TakeState((++o_sent_ + 1) % a_);  // merged into its row
    builder_.Give(2 * groups_.chunk().o);
  }

  // A row's accumulator, with its first block or the first partial output that arrives for it.
  void TakeState(int row) {
    if (state_[row]) return;
    state_[row] = true;
    builder_.Take(groups_.chunk().o_state);
  }

  const Schedule& schedule_;
  const int a_;
  const HeadGroups groups_;
  ProgramBuilder builder_;
  const bool keep_;
  std::vector<bool> state_;  // [a]: the row has an accumulator
  int o_sent_ = 0;
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
