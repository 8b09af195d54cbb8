#include "engine/schedule/schedule.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

// Algorithm 2's state. In a row, blocks become ready and are computed by rising v: one number holds it.
class GreedyScheduler {
 public:
  GreedyScheduler(Tile tile, OverlapCosts costs) : costs_(costs), computed_(tile.a, 0) {
    schedule_.tile = tile;
  }

  Schedule Run() && {
    const auto [a, b] = schedule_.tile;
    while (q_chunks_ < a || kv_chunks_ < b) Receive();
    for (int row = 1; row < a; ++row) {
      while (computed_[row] < b) Append(std::nullopt, 1);
      Append(Traffic::kO, costs_.c_o);
    }
    while (computed_[0] < b) Append(std::nullopt, 1);
    return std::move(schedule_);
  }

 private:
  // One communication of the first phase: the one that unlocks more blocks for its cost; Recv KV where they
  // tie.
  void Receive() {
    const int64_t n_q = q_chunks_ < schedule_.tile.a ? kv_chunks_ : 0;
    const int64_t n_kv = kv_chunks_ < schedule_.tile.b ? q_chunks_ : 0;
    if (n_q * costs_.c_kv > n_kv * costs_.c_q) {
      Append(Traffic::kQ, costs_.c_q);
      ++q_chunks_;
    } else {
      Append(Traffic::kKv, costs_.c_kv);
      ++kv_chunks_;
      first_ready_ = 1;
    }
  }

  // A step with ComputeBlocks(max_blocks): ready blocks in row-first order, row 0 last, since no rank waits
  // for it.
  void Append(std::optional<Traffic> comm, int max_blocks) {
    Step step{.comm = comm, .blocks = {}};
    const auto take_row = [&](int u) {
      while (static_cast<int>(step.blocks.size()) < max_blocks && computed_[u] < kv_chunks_) {
        step.blocks.push_back({.u = u, .v = computed_[u]++});
      }
    };
    for (; first_ready_ < q_chunks_; ++first_ready_) {
      take_row(first_ready_);
      if (computed_[first_ready_] < kv_chunks_) break;  // the step is full
    }
    take_row(0);
    schedule_.steps.push_back(std::move(step));
  }

  const OverlapCosts costs_;
  Schedule schedule_;
  int q_chunks_ = 1;           // Q#0 … that have arrived in earlier steps
  int kv_chunks_ = 1;          // KV#0 … that have arrived in earlier steps
  int first_ready_ = 1;        // rows 1 … first_ready_ − 1 have no ready block
  std::vector<int> computed_;  // blocks computed, by row
};

}  // namespace

const char* CommName(std::optional<Traffic> comm) { return comm.has_value() ? TrafficName(*comm) : "none"; }

std::string Schedule::DebugString() const {
  std::string text = tile.DebugString();
  if (kv_inner != 0) absl::StrAppend(&text, " in rings of ", kv_inner);
  for (const Step& step : steps) {
    absl::StrAppend(&text, " | ", CommName(step.comm));
    if (step.spans > 1) absl::StrAppend(&text, " spans ", step.spans);
    absl::StrAppend(&text, ":");
    for (const BlockIndex& block : step.blocks) absl::StrAppend(&text, " (", block.u, ",", block.v, ")");
  }
  return text;
}

Schedule GreedySchedule(Tile tile, OverlapCosts costs) { return GreedyScheduler(tile, costs).Run(); }

}  // namespace meshfill
