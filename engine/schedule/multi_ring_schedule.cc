#include "engine/schedule/multi_ring_schedule.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace meshfill {
namespace {

constexpr std::array kAllRings = {Ring::kQ, Ring::kKv, Ring::kKvOuter};

// Runs a rank on paper, and writes down what it does.
class MultiRingBuilder {
 public:
  MultiRingBuilder(Tile tile, int kv_inner, const RingSeconds& seconds)
      : seconds_(seconds), has_kv_(tile.b, false), computed_(tile.a, 0) {
    schedule_.tile = tile;
    schedule_.kv_inner = kv_inner;
    has_kv_[0] = true;
  }

  Schedule Run() && {
    while (true) {
      while (EndOne()) {
      }
      StartAlongQ();
      while (StartKv()) {
      }
      if (const std::optional<BlockIndex> block = NextBlock(); block.has_value()) {
        Compute(*block);
        continue;
      }
      double next = std::numeric_limits<double>::infinity();
      bool any = false;
      for (const Ring ring : kAllRings) {
        if (!Of(ring).busy) continue;
        any = true;
        next = std::min(next, messages_.ArrivalOf(ring));
      }
      if (!any) return std::move(schedule_);
      now_ = std::max(now_, next);
    }
  }

 private:
  struct UnderWay {
    bool busy = false;
    Traffic comm = Traffic::kQ;
    int received = 0;
    size_t step = 0;  // the step that started it
  };

  UnderWay& Of(Ring ring) { return under_way_[static_cast<int>(ring)]; }

  void StartAlongQ() {
    if (Of(Ring::kQ).busy) return;
    const auto [a, b] = schedule_.tile;
    const int row = o_sent_ + 1;
    if (q_chunks_ < a) {
      Start(Ring::kQ, Traffic::kQ, q_chunks_, seconds_.q);
    } else if (row < a && computed_[row] == b) {
      Start(Ring::kQ, Traffic::kO, row, seconds_.o);
    }
  }

  // The next Recv KV, where its ring is free and what it sends is here. False: there is none.
  bool StartKv() {
    if (kv_started_ == schedule_.tile.b - 1) return false;
    const KvHop hop = KvHopOf(schedule_.tile, schedule_.kv_inner, kv_started_);
    if (Of(hop.ring).busy || !has_kv_[hop.sent]) return false;
    Start(hop.ring, Traffic::kKv, hop.received, hop.ring == Ring::kKvOuter ? seconds_.kv_outer : seconds_.kv);
    ++kv_started_;
    return true;
  }

  void Start(Ring ring, Traffic comm, int received, const MessageSeconds& message) {
    Of(ring) = {.busy = true, .comm = comm, .received = received, .step = schedule_.steps.size()};
    messages_.Leave(ring, message, now_);
    schedule_.steps.push_back({.comm = comm, .blocks = {}});
    ended_ = false;
  }

  // With the step at hand, the message that has arrived and started first. False: there is none.
  bool EndOne() {
    UnderWay* first = nullptr;
    for (const Ring ring : kAllRings) {
      UnderWay& each = Of(ring);
      if (!each.busy || messages_.ArrivalOf(ring) > now_) continue;
      if (first == nullptr || each.step < first->step) first = &each;
    }
    if (first == nullptr) return false;
    schedule_.steps[first->step].spans = static_cast<int>(schedule_.steps.size() - first->step);
    first->busy = false;
    ended_ = true;
    if (first->comm == Traffic::kQ) ++q_chunks_;
    if (first->comm == Traffic::kO) ++o_sent_;
    if (first->comm == Traffic::kKv) {
      has_kv_[first->received] = true;
      while (kv_chunks_ < schedule_.tile.b && has_kv_[kv_chunks_]) ++kv_chunks_;
      first_ready_ = 1;
    }
    return true;
  }

  // Row 0, for which no rank waits, comes last.
  std::optional<BlockIndex> NextBlock() {
    while (first_ready_ < q_chunks_ && computed_[first_ready_] == kv_chunks_) ++first_ready_;
    const int row = first_ready_ < q_chunks_ ? first_ready_ : 0;
    if (computed_[row] == kv_chunks_) return std::nullopt;
    return BlockIndex{.u = row, .v = computed_[row]};
  }

  void Compute(BlockIndex block) {
    if (ended_ || schedule_.steps.empty()) schedule_.steps.push_back({.comm = std::nullopt, .blocks = {}});
    ended_ = false;
    schedule_.steps.back().blocks.push_back(block);
    ++computed_[block.u];
    now_ += seconds_.block;
  }

  const RingSeconds& seconds_;
  Schedule schedule_;
  double now_ = 0;
  MessagesUnderWay messages_;
  std::array<UnderWay, kRings> under_way_;
  bool ended_ = false;  // something did with the last step: what comes next belongs to another one
  int q_chunks_ = 1;    // Q#0 … that have arrived, the rank's own among them
  int kv_chunks_ = 1;   // KV#0 … that have arrived, the rank's own among them
  int kv_started_ = 0;
  int o_sent_ = 0;
  int first_ready_ = 1;        // rows 1 … first_ready_ − 1 have no ready block
  std::vector<bool> has_kv_;   // [b]; those of an outer ring may be ahead
  std::vector<int> computed_;  // [a]: blocks, by rising v
};

}  // namespace

Schedule MultiRingSchedule(Tile tile, int kv_inner, const RingSeconds& seconds) {
  return MultiRingBuilder(tile, kv_inner, seconds).Run();
}

}  // namespace meshfill
