// One rank's way through a schedule: which chunk each communication moves, when a chunk has had its last use,
// and what a row of the tile holds. Whoever runs, times, counts or draws a schedule visits this walk.
//
// The visitor hears of each step, in order:
//
//     Start(transfer)        its communication starts
//     Block(block, row)      each block, then FreeQ and FreeKv where it was the last use of its chunks
//     End(transfer)          a communication that spans no further step has ended, then FreeQ or FreeKv of
//                            the chunk that was passed on; of several, the one that started first
//
// A chunk is in use until its last block has run and, unless it is the last of its ring, until the receives
// that pass it on have ended. The rank's own Q#0 and KV#0 are there from the start.
#ifndef MESHFILL_ENGINE_SCHEDULE_SCHEDULE_WALK_H_
#define MESHFILL_ENGINE_SCHEDULE_SCHEDULE_WALK_H_

#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

// A communication by local indices (mesh.h). The k-th Recv Q sends Q#k and receives Q#k+1, the k-th Send O
// sends O#k+1 and receives O#(k+2) mod a; the k-th Recv KV is KvHopOf's.
struct Transfer {
  Traffic traffic = Traffic::kQ;  // kQ, kKv or kO
  int sent = 0;
  int received = 0;
  Ring ring = Ring::kQ;
  int number = 0;  // k, from 0
};

// What a row has for its partial output: nothing, the partial that arrived for it, or blocks of its own.
enum class RowState { kEmpty, kArrived, kBegun };

// What visitors derive from: each hides what it wants to know of. All three of Start, Block and End may
// return absl::Status.
struct ScheduleVisitor {
  // True: a chunk that is passed on is handed over as its send starts, and FreeQ and FreeKv follow Start.
  // Else its buffer stays in use until the send has ended.
  static constexpr bool kHandsOver = false;

  void Start(const Transfer&) {}
  void Block(BlockIndex, RowState) {}     // what the block's row had before
  void End(const Transfer&, RowState) {}  // Send O: what the received row had before
  void FreeQ(int) {}                      // Q#u is not used again
  void FreeKv(int) {}                     // KV#v is not used again
};

// State of a walk that is under way. The schedule has passed CheckSchedule.
class WalkState {
 public:
  WalkState(Tile tile, int kv_inner)
      : tile_(tile),
        kv_inner_(kv_inner),
        q_uses_left_(tile.a, tile.b + 1),
        kv_uses_left_(tile.b, tile.a),
        rows_(tile.a) {
    --q_uses_left_.back();
    for (int number = 0; number < tile.b - 1; ++number) {
      ++kv_uses_left_[KvHopOf(tile, kv_inner, number).sent];
    }
  }

  // The communication that starts.
  Transfer Next(Traffic traffic) {
    const int k = started_[traffic]++;
    if (traffic == Traffic::kQ) return {traffic, k, k + 1, Ring::kQ, k};
    if (traffic == Traffic::kO) return {traffic, k + 1, (k + 2) % tile_.a, Ring::kQ, k};
    const KvHop hop = KvHopOf(tile_, kv_inner_, k);
    return {traffic, hop.sent, hop.received, hop.ring, k};
  }
  RowState row(int u) const { return rows_[u]; }

  void Compute(BlockIndex block) { rows_[block.u] = RowState::kBegun; }
  // True at the last use of the chunk.
  bool UseQ(int u) { return --q_uses_left_[u] == 0; }
  bool UseKv(int v) { return --kv_uses_left_[v] == 0; }
  void ReceiveO(int u) {
    if (rows_[u] == RowState::kEmpty) rows_[u] = RowState::kArrived;
  }

 private:
  const Tile tile_;
  const int kv_inner_;
  std::vector<int> q_uses_left_;  // blocks, and sends
  std::vector<int> kv_uses_left_;
  std::vector<RowState> rows_;
  PerTraffic<int> started_;
};

// Walks until the end, or until a visitor's status is not OK. Returns that status where the visitor has them.
template <typename Visitor>
auto Walk(const Schedule& schedule, Visitor& visitor) {
  using Result = decltype(visitor.Block(BlockIndex(), RowState()));
  absl::Status status;
  const auto goes_on = [&status](auto event) {
    if constexpr (std::is_void_v<decltype(event())>) {
      event();
    } else {
      status = event();
    }
    return status.ok();
  };
  struct UnderWay {
    Transfer transfer;
    int steps_left;  // until it has ended
  };
  std::vector<UnderWay> under_way;  // by start; at most one along each ring
  WalkState state(schedule.tile, schedule.kv_inner);
  const auto pass_on = [&](const Transfer& transfer) {
    if (transfer.traffic == Traffic::kQ && state.UseQ(transfer.sent)) visitor.FreeQ(transfer.sent);
    if (transfer.traffic == Traffic::kKv && state.UseKv(transfer.sent)) visitor.FreeKv(transfer.sent);
  };
  const auto end = [&](const Transfer& transfer) {
    const bool is_o = transfer.traffic == Traffic::kO;
    const RowState received = is_o ? state.row(transfer.received) : RowState::kEmpty;
    if (!goes_on([&] { return visitor.End(transfer, received); })) return false;
    if constexpr (!Visitor::kHandsOver) pass_on(transfer);
    if (is_o) state.ReceiveO(transfer.received);
    return true;
  };
  const auto run = [&](const Step& step) {
    if (step.comm.has_value()) {
      under_way.push_back({state.Next(*step.comm), step.spans});
      const Transfer transfer = under_way.back().transfer;
      if (!goes_on([&] { return visitor.Start(transfer); })) return false;
      if constexpr (Visitor::kHandsOver) pass_on(transfer);
    }
    for (const BlockIndex block : step.blocks) {
      if (!goes_on([&] { return visitor.Block(block, state.row(block.u)); })) return false;
      state.Compute(block);
      if (state.UseQ(block.u)) visitor.FreeQ(block.u);
      if (state.UseKv(block.v)) visitor.FreeKv(block.v);
    }
    for (auto each = under_way.begin(); each != under_way.end();) {
      if (--each->steps_left > 0) {
        ++each;
        continue;
      }
      if (!end(each->transfer)) return false;
      each = under_way.erase(each);
    }
    return true;
  };
  for (const Step& step : schedule.steps) {
    if (!run(step)) break;
  }
  if constexpr (!std::is_void_v<Result>) return status;
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_SCHEDULE_WALK_H_
