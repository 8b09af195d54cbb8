#include "engine/sim/backward_schedule.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using enum Traffic;

// Algorithm 3 line by line, over a matrix of blocks.
class PlainAlgorithm3 {
 public:
  PlainAlgorithm3(Tile tile, BackwardCosts costs)
      : tile_(tile), costs_(costs), done_(tile.a, std::vector<bool>(tile.b, false)) {
    for (int i = 1; i <= tile.a; ++i) rows_.push_back(i % tile.a);
    for (int i = 1; i <= tile.b; ++i) columns_.push_back(i % tile.b);
  }

  BackwardSchedule Run() {
    const auto [a, b] = tile_;
    schedule_.tile = tile_;
    while (q_ < a || kv_ < b) {
      const double n_odoq = q_ < a ? kv_ : 0;
      const double n_kv = kv_ < b ? q_ : 0;
      if (n_odoq / costs_.c_odoq > n_kv / costs_.c_kv) {
        Emit(kQ, costs_.c_odoq);
        ++q_;
      } else {
        Emit(kKv, costs_.c_kv);
        ++kv_;
      }
    }
    int dq = 1;
    int dkv = 1;
    while (dq < a || dkv < b) {
      while (!(dq < a && RowLeft(dq) == 0) && !(dkv < b && ColumnLeft(dkv) == 0)) Emit(std::nullopt, 1);
      if (dq < a && RowLeft(dq) == 0) {
        Emit(kDq, costs_.c_dq);
        ++dq;
      }
      if (dkv < b && ColumnLeft(dkv) == 0) {
        Emit(kDkv, costs_.c_dkv);
        ++dkv;
      }
    }
    while (Choose().u >= 0) Emit(std::nullopt, 1);
    return schedule_;
  }

 private:
  int RowLeft(int u) const { return static_cast<int>(std::count(done_[u].begin(), done_[u].end(), false)); }
  int ColumnLeft(int v) const {
    int left = 0;
    for (const auto& row : done_) left += row[v] ? 0 : 1;
    return left;
  }
  bool Ready(int u, int v) const { return u < q_ && v < kv_ && !done_[u][v]; }

  BlockIndex Choose() const {
    const auto row = std::find_if(rows_.begin(), rows_.end(), [&](int u) { return RowLeft(u) > 0; });
    if (row == rows_.end()) return {-1, -1};
    const auto column =
        std::find_if(columns_.begin(), columns_.end(), [&](int v) { return ColumnLeft(v) > 0; });
    // c_dQ / n_dQ < c_dKV / n_dKV, without rounding.
    if (int64_t{costs_.c_dq} * ColumnLeft(*column) < int64_t{costs_.c_dkv} * RowLeft(*row)) {
      for (int v : columns_) {
        for (int u : rows_) {
          if (Ready(u, v)) return {u, v};
        }
      }
    } else {
      for (int u : rows_) {
        for (int v : columns_) {
          if (Ready(u, v)) return {u, v};
        }
      }
    }
    return {-1, -1};
  }

  void Emit(std::optional<Traffic> comm, int blocks) {
    Step step{.comm = comm, .blocks = {}};
    for (int i = 0; i < blocks; ++i) {
      const BlockIndex block = Choose();
      if (block.u < 0) break;
      done_[block.u][block.v] = true;
      step.blocks.push_back(block);
    }
    schedule_.steps.push_back(step);
  }

  const Tile tile_;
  const BackwardCosts costs_;
  std::vector<std::vector<bool>> done_;
  std::vector<int> rows_;  // in the order in which their gradients leave
  std::vector<int> columns_;
  int q_ = 1;
  int kv_ = 1;
  BackwardSchedule schedule_;
};

BackwardCosts RandomCosts(std::mt19937_64& random) {
  return {.c_odoq = Draw(random, 1, 9),
          .c_kv = Draw(random, 1, 9),
          .c_dq = Draw(random, 1, 9),
          .c_dkv = Draw(random, 1, 9)};
}

TEST(BackwardSchedule, IsAlgorithm3AndPassesItsCheck) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 400; ++draw) {
    const Tile tile{.a = Draw(random, 1, 10), .b = Draw(random, 1, 10)};
    const BackwardCosts costs = RandomCosts(random);
    const BackwardSchedule schedule = GreedyBackwardSchedule(tile, costs);
    EXPECT_EQ(schedule, PlainAlgorithm3(tile, costs).Run()) << schedule.DebugString();
    EXPECT_TRUE(CheckBackwardSchedule(schedule).ok()) << CheckBackwardSchedule(schedule);
  }
}

TEST(BackwardSchedule, AnyOrderPassesItsCheck) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 400; ++draw) {
    const Tile tile{.a = Draw(random, 1, 10), .b = Draw(random, 1, 10)};
    const BackwardCosts costs = RandomCosts(random);
    for (BackwardOrder order : {BackwardOrder::kRowsFirst, BackwardOrder::kColumnsFirst}) {
      const absl::Status status = CheckBackwardSchedule(GreedyBackwardSchedule(tile, costs, order));
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// Where a block hides any transfer, nothing hides the last one: (0, 0) is computed first. Of the two kinds of
// gradient, an order chooses the one that leaves last.
TEST(BackwardSchedule, OrderChoosesTheLastTransfer) {
  const auto bare_steps = [](const BackwardSchedule& schedule) {
    return std::count_if(schedule.steps.begin(), schedule.steps.end(),
                         [](const Step& step) { return step.blocks.empty(); });
  };
  for (const Tile tile : {Tile{8, 4}, Tile{4, 8}, Tile{16, 16}}) {
    for (auto [order, last] :
         {std::pair{BackwardOrder::kRowsFirst, kDkv}, std::pair{BackwardOrder::kColumnsFirst, kDq}}) {
      const BackwardSchedule schedule = GreedyBackwardSchedule(tile, {}, order);
      EXPECT_EQ(bare_steps(schedule), 1) << schedule.DebugString();
      EXPECT_EQ(schedule.steps.back().comm, last) << schedule.DebugString();
    }
  }
}

TEST(BackwardSchedule, RingSendsEveryGradientAfterItsBlock) {
  const BackwardSchedule ring = GreedyBackwardSchedule({.a = 1, .b = 4}, {});
  EXPECT_EQ(ring.DebugString(), "1x4 | kv: (0,0) | kv: (0,1) | kv: (0,2) | dkv: (0,3) | dkv: | dkv:");
}

TEST(BackwardSchedule, CheckRefusesWhatCannotRun) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 100; ++draw) {
    const Tile tile{.a = Draw(random, 2, 6), .b = Draw(random, 2, 6)};
    const BackwardSchedule good = GreedyBackwardSchedule(tile, RandomCosts(random));

    BackwardSchedule twice = good;
    twice.steps.push_back({.comm = std::nullopt, .blocks = {{0, 0}}});
    EXPECT_FALSE(CheckBackwardSchedule(twice).ok());

    BackwardSchedule missing = good;
    const auto with_blocks = std::find_if(missing.steps.rbegin(), missing.steps.rend(),
                                          [](const Step& step) { return !step.blocks.empty(); });
    with_blocks->blocks.pop_back();
    EXPECT_FALSE(CheckBackwardSchedule(missing).ok());

    BackwardSchedule early = good;  // the first gradient before anything is computed
    const auto send = std::find_if(early.steps.begin(), early.steps.end(),
                                   [](const Step& step) { return step.comm == kDq || step.comm == kDkv; });
    std::swap(send->comm, early.steps.front().comm);
    EXPECT_FALSE(CheckBackwardSchedule(early).ok());

    for (const auto& [comm, what] :
         {std::pair{kQ, "receives a row too many"}, std::pair{kKv, "receives a column too many"},
          std::pair{kDq, "sends dQ of an unfinished row"},
          std::pair{kDkv, "sends dKV of an unfinished column"}}) {
      BackwardSchedule too_many = good;
      too_many.steps.push_back({.comm = comm, .blocks = {}});
      const absl::Status refused = CheckBackwardSchedule(too_many);
      EXPECT_EQ(refused.code(), absl::StatusCode::kInternal);
      EXPECT_NE(refused.message().find(what), std::string::npos) << refused;

      BackwardSchedule too_few = good;
      const auto last = std::find_if(too_few.steps.rbegin(), too_few.steps.rend(),
                                     [&, comm = comm](const Step& step) { return step.comm == comm; });
      last->comm = std::nullopt;
      if (last->blocks.empty()) too_few.steps.erase(std::next(last).base());
      EXPECT_FALSE(CheckBackwardSchedule(too_few).ok());
    }

    BackwardSchedule idle = good;
    idle.steps.push_back({});
    EXPECT_FALSE(CheckBackwardSchedule(idle).ok());

    for (const BlockIndex outside : {BlockIndex{-1, 0}, {0, -1}, {tile.a, 0}, {0, tile.b}}) {
      BackwardSchedule too_far = good;
      too_far.steps.back().blocks.push_back(outside);
      EXPECT_FALSE(CheckBackwardSchedule(too_far).ok());
    }
  }
}

}  // namespace
}  // namespace meshfill
