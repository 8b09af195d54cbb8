// Runs a schedule on all ranks of a mesh in lockstep, with names instead of data: each chunk carries its
// global index, each partial output the KV chunks that it has seen. Written from the paper's operations
// (Mesh-Attention §3.4), apart from the schedule checker and the executor.
#ifndef MESHFILL_TESTS_ENGINE_RUN_LOCKSTEP_MESH_H_
#define MESHFILL_TESTS_ENGINE_RUN_LOCKSTEP_MESH_H_

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

class LockstepMesh {
 public:
  explicit LockstepMesh(Tile tile, int kv_inner = 0) : mesh_(tile, KvOrder::kRising, kv_inner) {
    // Of each round of a double ring but the last: the first chunk of the next one, then those of its own.
    const int round = kv_inner == 0 ? tile.b : kv_inner;
    for (int first = 0; first < tile.b; first += round) {
      if (first + round < tile.b) kv_hops_.push_back({first, first + round, /*outer=*/true});
      for (int v = first; v < first + round - 1; ++v) kv_hops_.push_back({v, v + 1, /*outer=*/false});
    }
    for (int rank = 0; rank < mesh_.ranks(); ++rank)
      ranks_[rank] = {.q = {{0, rank}}, .kv = {{0, rank}}, .o = {}};
  }

  // What goes wrong first; empty: every block was computed once by its owner, and every output is whole at
  // home.
  std::string Run(const Schedule& schedule) {
    for (const Step& step : schedule.steps) {
      if (step.spans < 1 || (step.spans > 1 && !step.comm.has_value())) Fail("spans steps with nothing");
      if (step.comm.has_value()) Start(step);
      for (const BlockIndex& block : step.blocks) Compute(block);
      std::erase_if(under_way_, [this](UnderWay& each) {
        if (--each.steps_left > 0) return false;
        Receive(each);
        return true;
      });
      if (!error_.empty()) return error_;
    }
    if (!under_way_.empty()) Fail("ends before a message does");
    CheckOutputs();
    return error_;
  }

 private:
  struct Partial {
    int q_chunk = 0;
    std::set<int> kv_chunks;
  };
  struct Rank {
    std::map<int, int> q;      // Q#u → global index of the chunk that lies there
    std::map<int, int> kv;     // KV#v → likewise
    std::map<int, Partial> o;  // O#u
  };
  struct Message {
    int chunk = 0;
    Partial partial;
  };

  struct KvHop {
    int sent = 0;  // KV#v
    int received = 0;
    bool outer = false;
  };

  struct UnderWay {
    Traffic comm;
    KvHop hop;
    std::map<int, Message> sent;  // by receiver
    int steps_left;
  };

  void Start(const Step& step) {
    KvHop hop;
    if (step.comm == Traffic::kKv) {
      if (started_kv_ == kv_hops_.size()) return Fail("receives more KV chunks than the tile has");
      hop = kv_hops_[started_kv_++];
    }
    for (const UnderWay& each : under_way_) {
      if ((each.comm == Traffic::kKv) == (step.comm == Traffic::kKv) && each.hop.outer == hop.outer) {
        Fail("has two messages along a ring");
      }
    }
    under_way_.push_back({*step.comm, hop, Send(step.comm, hop), step.spans});
  }

  void Fail(std::string what) {
    if (error_.empty()) error_ = std::move(what);
  }

  std::map<int, Message> Send(std::optional<Traffic> comm, const KvHop& hop) {
    std::map<int, Message> sent;  // by receiver
    for (auto& [rank, state] : ranks_) {
      if (comm == Traffic::kQ) {
        if (!state.q.contains(recv_q_)) Fail("sends a Q chunk that it has not");
        sent[mesh_.QSendTo(rank)].chunk = state.q[recv_q_];
      }
      if (comm == Traffic::kKv) {
        if (!state.kv.contains(hop.sent)) {
          Fail("sends a KV chunk that it has not");
          continue;
        }
        sent[hop.outer ? mesh_.KvOuterSendTo(rank) : mesh_.KvSendTo(rank)].chunk = state.kv[hop.sent];
      }
      if (comm == Traffic::kO) {
        const int row = send_o_ + 1;
        // Its own b columns, and b of each rank that the partial has passed.
        if (state.o[row].kv_chunks.size() != static_cast<size_t>(mesh_.tile().b) * (send_o_ + 1)) {
          Fail("sends an O chunk that is not whole");
        }
        sent[mesh_.QSendTo(rank)].partial = state.o[row];
        state.o.erase(row);
      }
    }
    return sent;
  }

  void Compute(BlockIndex block) {
    for (auto& [rank, state] : ranks_) {
      if (!state.q.contains(block.u) || !state.kv.contains(block.v))
        return Fail("computes with a chunk that it has not");
      const int q = state.q[block.u];
      const int kv = state.kv[block.v];
      if (mesh_.Owner(q, kv) != rank) Fail("computes a block of another rank");
      if (!computed_.emplace(q, kv).second) Fail("computes a block twice");
      Partial& partial = state.o.emplace(block.u, Partial{.q_chunk = q, .kv_chunks = {}}).first->second;
      if (!partial.kv_chunks.insert(kv).second) Fail("counts a block twice in an output");
    }
  }

  void Receive(const UnderWay& ended) {
    const Traffic comm = ended.comm;
    for (const auto& [rank, message] : ended.sent) {
      Rank& state = ranks_[rank];
      if (comm == Traffic::kQ) state.q[recv_q_ + 1] = message.chunk;
      if (comm == Traffic::kKv) state.kv[ended.hop.received] = message.chunk;
      if (comm == Traffic::kO) Reduce(rank, (send_o_ + 2) % mesh_.tile().a, message.partial);
    }
    if (comm == Traffic::kQ && ++recv_q_ >= mesh_.tile().a) Fail("receives more Q chunks than the tile has");
    if (comm == Traffic::kKv) ++recv_kv_;
    if (comm == Traffic::kO && ++send_o_ >= mesh_.tile().a) Fail("sends more O chunks than the tile has");
    for (const auto& [rank, state] : ranks_) {
      for (const auto& [u, chunk] : state.q) {
        if (chunk != mesh_.QChunk(rank, u)) Fail("a Q chunk lies at the wrong local index");
      }
      for (const auto& [v, chunk] : state.kv) {
        if (chunk != mesh_.KvChunk(rank, v)) Fail("a KV chunk lies at the wrong local index");
      }
    }
  }

  void Reduce(int rank, int row, const Partial& partial) {
    if (partial.q_chunk != mesh_.QChunk(rank, row)) Fail("a partial output arrives at the wrong row");
    Partial& into =
        ranks_[rank].o.emplace(row, Partial{.q_chunk = partial.q_chunk, .kv_chunks = {}}).first->second;
    for (int kv : partial.kv_chunks) {
      if (!into.kv_chunks.insert(kv).second) Fail("reduces a block twice");
    }
  }

  void CheckOutputs() {
    const size_t n = mesh_.ranks();
    if (computed_.size() != n * n) Fail("leaves blocks out");
    for (auto& [rank, state] : ranks_) {
      if (state.o.size() != 1 || state.o[0].q_chunk != rank || state.o[0].kv_chunks.size() != n) {
        Fail("ends with an output that is not whole");
      }
    }
    if (recv_q_ != mesh_.tile().a - 1 || recv_kv_ != mesh_.tile().b - 1) Fail("leaves a chunk out");
  }

  const Mesh mesh_;
  std::map<int, Rank> ranks_;
  std::set<std::pair<int, int>> computed_;  // (Q chunk, KV chunk), of all ranks
  std::vector<KvHop> kv_hops_;
  std::vector<UnderWay> under_way_;
  size_t started_kv_ = 0;
  int recv_q_ = 0;
  int recv_kv_ = 0;
  int send_o_ = 0;
  std::string error_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_RUN_LOCKSTEP_MESH_H_
