#include "engine/schedule/two_ring_schedule.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace meshfill {
namespace {

// Runs a rank on paper, and writes down what it does.
class TwoRingBuilder {
 public:
  TwoRingBuilder(Tile tile, const RingSeconds& seconds) : seconds_(seconds), computed_(tile.a, 0) {
    schedule_.tile = tile;
  }

  Schedule Run() && {
    while (true) {
      while (EndOne()) {
      }
      Start(along_q_, NextAlongQ(), along_kv_);
      Start(along_kv_, NextAlongKv(), along_q_);
      if (const std::optional<BlockIndex> block = NextBlock(); block.has_value()) {
        Compute(*block);
        continue;
      }
      if (!along_q_.busy && !along_kv_.busy) return std::move(schedule_);
      now_ = std::min(ArrivalOf(along_q_), ArrivalOf(along_kv_));
    }
  }

 private:
  struct Ring {
    Traffic comm = Traffic::kQ;
    size_t step = 0;  // the step that started it
    bool busy = false;
    MessageUnderWay message = {};
  };

  static double ArrivalOf(const Ring& ring) {
    return ring.busy ? ring.message.arrives : std::numeric_limits<double>::infinity();
  }

  std::optional<Traffic> NextAlongQ() const {
    const auto [a, b] = schedule_.tile;
    if (q_chunks_ < a) return Traffic::kQ;
    const int row = o_sent_ + 1;
    if (row < a && computed_[row] == b) return Traffic::kO;
    return std::nullopt;
  }

  std::optional<Traffic> NextAlongKv() const {
    if (kv_chunks_ < schedule_.tile.b) return Traffic::kKv;
    return std::nullopt;
  }

  void Start(Ring& ring, std::optional<Traffic> comm, const Ring& other) {
    if (ring.busy || !comm.has_value()) return;
    const MessageSeconds& message = comm == Traffic::kQ    ? seconds_.q
                                    : comm == Traffic::kKv ? seconds_.kv
                                                           : seconds_.o;
    ring = {.comm = *comm,
            .step = schedule_.steps.size(),
            .busy = true,
            .message = Leave(message, now_, other.message)};
    schedule_.steps.push_back({.comm = comm, .blocks = {}});
    ended_ = false;
  }

  // With the step at hand, the message that has arrived and started first. False: there is none.
  bool EndOne() {
    Ring* first = nullptr;
    for (Ring* const ring : {&along_q_, &along_kv_}) {
      if (!ring->busy || ring->message.arrives > now_) continue;
      if (first == nullptr || ring->step < first->step) first = ring;
    }
    if (first == nullptr) return false;
    schedule_.steps[first->step].spans = static_cast<int>(schedule_.steps.size() - first->step);
    first->busy = false;
    ended_ = true;
    if (first->comm == Traffic::kQ) ++q_chunks_;
    if (first->comm == Traffic::kO) ++o_sent_;
    if (first->comm == Traffic::kKv) {
      ++kv_chunks_;
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
  Ring along_q_;
  Ring along_kv_;
  bool ended_ = false;  // something did with the last step: what comes next belongs to another one
  int q_chunks_ = 1;    // Q#0 … that have arrived, the rank's own among them
  int kv_chunks_ = 1;   // KV#0 … that have arrived, the rank's own among them
  int o_sent_ = 0;
  int first_ready_ = 1;        // rows 1 … first_ready_ − 1 have no ready block
  std::vector<int> computed_;  // [a]: blocks, by rising v
};

}  // namespace

Schedule TwoRingSchedule(Tile tile, const RingSeconds& seconds) {
  return TwoRingBuilder(tile, seconds).Run();
}

}  // namespace meshfill
