#include "engine/sim/backward_schedule.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

// Rows or columns of a tile, in the order in which their gradients leave: 1, 2, …, and the rank's own, 0,
// last.
class Line {
 public:
  Line(int count, int blocks_each) : left_(count, blocks_each), ready_(count, 0) {}

  int count() const { return static_cast<int>(left_.size()); }
  int left(int index) const { return left_[index]; }  // blocks not computed
  void AddReady(int index, int blocks) { ready_[index] += blocks; }
  void Compute(int index) {
    --left_[index];
    --ready_[index];
  }
  int FirstUnfinished() const {
    return FirstWhere([&](int index) { return left_[index] > 0; });
  }
  int FirstReady() const {
    return FirstWhere([&](int index) { return ready_[index] > 0; });
  }

 private:
  template <typename Predicate>
  int FirstWhere(Predicate predicate) const {
    for (int index = 1; index < count(); ++index) {
      if (predicate(index)) return index;
    }
    return 0;
  }

  std::vector<int> left_;
  std::vector<int> ready_;  // [count]: blocks of `left_` whose chunks are here
};

// Algorithm 3's state.
class BackwardScheduler {
 public:
  BackwardScheduler(Tile tile, BackwardCosts costs, BackwardOrder order)
      : tile_(tile),
        costs_(costs),
        order_(order),
        rows_(tile.a, tile.b),
        columns_(tile.b, tile.a),
        computed_(tile.a * tile.b, false) {
    schedule_.tile = tile;
    rows_.AddReady(0, 1);
    columns_.AddReady(0, 1);
  }

  BackwardSchedule Run() && {
    const int a = tile_.a, b = tile_.b;
    while (q_chunks_ < a || kv_chunks_ < b) Receive();
    int dq_sent = 0;
    int dkv_sent = 0;
    while (dq_sent < a - 1 || dkv_sent < b - 1) {
      const auto dq_valid = [&] { return dq_sent < a - 1 && rows_.left(dq_sent + 1) == 0; };
      const auto dkv_valid = [&] { return dkv_sent < b - 1 && columns_.left(dkv_sent + 1) == 0; };
      while (!dq_valid() && !dkv_valid()) Append(std::nullopt, 1);
      if (dq_valid()) {
        Append(Traffic::kDq, costs_.c_dq);
        ++dq_sent;
      }
      if (dkv_valid()) {
        Append(Traffic::kDkv, costs_.c_dkv);
        ++dkv_sent;
      }
    }
    while (blocks_ < a * b) Append(std::nullopt, 1);
    return std::move(schedule_);
  }

 private:
  // The receive that unlocks more blocks for its cost; Recv KV where they tie.
  void Receive() {
    const int64_t n_odoq = q_chunks_ < tile_.a ? kv_chunks_ : 0;
    const int64_t n_kv = kv_chunks_ < tile_.b ? q_chunks_ : 0;
    if (n_odoq * costs_.c_kv > n_kv * costs_.c_odoq) {
      Append(Traffic::kQ, costs_.c_odoq);
      rows_.AddReady(q_chunks_++, kv_chunks_);
      for (int v = 0; v < kv_chunks_; ++v) columns_.AddReady(v, 1);
    } else {
      Append(Traffic::kKv, costs_.c_kv);
      columns_.AddReady(kv_chunks_++, q_chunks_);
      for (int u = 0; u < q_chunks_; ++u) rows_.AddReady(u, 1);
    }
  }

  void Append(std::optional<Traffic> comm, int max_blocks) {
    Step step{.comm = comm, .blocks = {}};
    while (static_cast<int>(step.blocks.size()) < max_blocks && blocks_ < q_chunks_ * kv_chunks_) {
      const BlockIndex block = ChooseNextBlock();
      computed_[block.u * tile_.b + block.v] = true;
      rows_.Compute(block.u);
      columns_.Compute(block.v);
      ++blocks_;
      step.blocks.push_back(block);
    }
    schedule_.steps.push_back(std::move(step));
  }

  BlockIndex ChooseNextBlock() const {
    if (ColumnNext()) {
      const int v = columns_.FirstReady();
      return {.u = FirstOpen(q_chunks_, [&](int u) { return computed_[u * tile_.b + v]; }), .v = v};
    }
    const int u = rows_.FirstReady();
    return {.u = u, .v = FirstOpen(kv_chunks_, [&](int v) { return computed_[u * tile_.b + v]; })};
  }

  // Alternating, the line whose gradient leaves sooner for its cost.
  bool ColumnNext() const {
    if (order_ != BackwardOrder::kAlternate) return order_ == BackwardOrder::kColumnsFirst;
    const int64_t n_dq = rows_.left(rows_.FirstUnfinished());
    const int64_t n_dkv = columns_.left(columns_.FirstUnfinished());
    return costs_.c_dq * n_dkv < costs_.c_dkv * n_dq;
  }

  // The first index of a line with a ready block that is not computed; 0 comes last.
  template <typename Computed>
  static int FirstOpen(int arrived, Computed computed) {
    for (int index = 1; index < arrived; ++index) {
      if (!computed(index)) return index;
    }
    return 0;
  }

  const Tile tile_;
  const BackwardCosts costs_;
  const BackwardOrder order_;
  BackwardSchedule schedule_;
  Line rows_;
  Line columns_;
  std::vector<bool> computed_;  // [a, b]
  int blocks_ = 0;
  int q_chunks_ = 1;   // OdOQ#0 … that have arrived in earlier steps
  int kv_chunks_ = 1;  // KV#0 … that have arrived in earlier steps
};

// What one rank holds as the steps go by.
class BackwardChecker {
 public:
  explicit BackwardChecker(const BackwardSchedule& schedule)
      : schedule_(schedule),
        tile_(schedule.tile),
        computed_(tile_.a * tile_.b, false),
        row_blocks_(tile_.a, 0),
        column_blocks_(tile_.b, 0) {}

  absl::Status Run() {
    for (const Step& step : schedule_.steps) {
      if (std::optional<std::string> problem = ProblemOf(step); problem.has_value()) {
        return absl::InternalError(absl::StrCat("backward schedule ", tile_.DebugString(), ", step ",
                                                &step - schedule_.steps.data(), ": ", *problem));
      }
    }
    if (q_received_ != tile_.a - 1 || kv_received_ != tile_.b - 1 || dq_sent_ != tile_.a - 1 ||
        dkv_sent_ != tile_.b - 1 || std::count(computed_.begin(), computed_.end(), false) != 0) {
      return absl::InternalError(
          absl::StrCat("backward schedule ", tile_.DebugString(), " ends before all is computed and sent"));
    }
    return absl::OkStatus();
  }

 private:
  std::optional<std::string> ProblemOf(const Step& step) {
    if (!step.comm.has_value() && step.blocks.empty()) return "is idle";
    if (step.comm == Traffic::kQ && q_received_ >= tile_.a - 1) return "receives a row too many";
    if (step.comm == Traffic::kKv && kv_received_ >= tile_.b - 1) return "receives a column too many";
    if (step.comm == Traffic::kDq && (dq_sent_ >= tile_.a - 1 || row_blocks_[dq_sent_ + 1] != tile_.b)) {
      return "sends dQ of an unfinished row";
    }
    if (step.comm == Traffic::kDkv &&
        (dkv_sent_ >= tile_.b - 1 || column_blocks_[dkv_sent_ + 1] != tile_.a)) {
      return "sends dKV of an unfinished column";
    }
    for (const auto [u, v] : step.blocks) {
      const std::string block = absl::StrCat("block (", u, ",", v, ") ");
      if (u < 0 || v < 0 || u > q_received_ || v > kv_received_) return block + "has not all of its chunks";
      if (computed_[u * tile_.b + v]) return block + "is computed twice";
      computed_[u * tile_.b + v] = true;
      ++row_blocks_[u];
      ++column_blocks_[v];
    }
    q_received_ += step.comm == Traffic::kQ;
    kv_received_ += step.comm == Traffic::kKv;
    dq_sent_ += step.comm == Traffic::kDq;
    dkv_sent_ += step.comm == Traffic::kDkv;
    return std::nullopt;
  }

  const BackwardSchedule& schedule_;
  const Tile tile_;
  std::vector<bool> computed_;  // [a, b]
  std::vector<int> row_blocks_;
  std::vector<int> column_blocks_;
  int q_received_ = 0;
  int kv_received_ = 0;
  int dq_sent_ = 0;
  int dkv_sent_ = 0;
};

}  // namespace

std::string BackwardSchedule::DebugString() const {
  std::string text = tile.DebugString();
  for (const Step& step : steps) {
    absl::StrAppend(&text, " | ", CommName(step.comm), ":");
    for (const BlockIndex& block : step.blocks) absl::StrAppend(&text, " (", block.u, ",", block.v, ")");
  }
  return text;
}

BackwardSchedule GreedyBackwardSchedule(Tile tile, BackwardCosts costs, BackwardOrder order) {
  return BackwardScheduler(tile, costs, order).Run();
}

absl::Status CheckBackwardSchedule(const BackwardSchedule& schedule) {
  return BackwardChecker(schedule).Run();
}

}  // namespace meshfill
