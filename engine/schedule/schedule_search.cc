#include "engine/schedule/schedule_search.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/schedule/row_first_builder.h"
#include "engine/schedule/schedule_cost.h"

namespace meshfill {
namespace {

// The time of all communications, which every schedule has.
int64_t CommTime(Tile tile, OverlapCosts costs) {
  return int64_t{tile.a - 1} * (int64_t{costs.c_q} + costs.c_o) + int64_t{tile.b - 1} * costs.c_kv;
}

class OrderSearch {
 public:
  OrderSearch(Tile tile, OverlapCosts costs)
      : tile_(tile), costs_(costs), bound_(LeastTimeBound(tile, costs) - CommTime(tile, costs)) {}

  Schedule Run() {
    Extend({.left = tile_.ranks(),
            .hideable = CommTime(tile_, costs_),
            .computed = std::vector<int>(tile_.a, 0)});
    RowFirstBuilder builder(tile_, costs_);
    for (Traffic comm : best_order_) builder.Append(comm);
    return std::move(builder).Finish();
  }

 private:
  // State after the communications in `order_`.
  struct State {
    int q_chunks = 1;
    int kv_chunks = 1;
    int o_sent = 0;
    int64_t exposed = 0;        // blocks that ran beside no communication
    int64_t left = 0;           // blocks yet to run
    int64_t hideable = 0;       // blocks that the communications yet to come hide at most
    std::vector<int> computed;  // [a]
  };

  void Extend(const State& state) {
    if (best_exposed_ == bound_) return;
    if (state.exposed + std::max<int64_t>(0, state.left - state.hideable) >= best_exposed_) return;
    if (state.q_chunks == tile_.a && state.kv_chunks == tile_.b && state.o_sent == tile_.a - 1) {
      best_exposed_ = state.exposed + state.left;
      best_order_ = order_;
      return;
    }
    for (Traffic comm : {Traffic::kKv, Traffic::kQ, Traffic::kO}) {
      if (!MayStart(state, comm)) continue;
      order_.push_back(comm);
      Extend(After(state, comm));
      order_.pop_back();
    }
  }

  bool MayStart(const State& state, Traffic comm) const {
    if (comm == Traffic::kQ) return state.q_chunks < tile_.a;
    if (comm == Traffic::kKv) return state.kv_chunks < tile_.b;
    return state.kv_chunks == tile_.b && state.o_sent + 1 < state.q_chunks;
  }

  State After(State state, Traffic comm) const {
    if (comm == Traffic::kO) {
      int& row = state.computed[++state.o_sent];
      state.exposed += tile_.b - row;
      state.left -= tile_.b - row;
      row = tile_.b;
    }
    const int hides = CommBlocks(comm, costs_);
    int room = hides;
    for (int i = 1; i <= state.q_chunks; ++i) {
      int& row = state.computed[i % state.q_chunks];
      const int taken = std::min(room, state.kv_chunks - row);
      row += taken;
      room -= taken;
    }
    state.left -= hides - room;
    state.hideable -= hides;
    state.q_chunks += comm == Traffic::kQ ? 1 : 0;
    state.kv_chunks += comm == Traffic::kKv ? 1 : 0;
    return state;
  }

  const Tile tile_;
  const OverlapCosts costs_;
  const int64_t bound_;  // lower bound on the exposed blocks
  std::vector<Traffic> order_;
  std::vector<Traffic> best_order_;
  int64_t best_exposed_ = INT64_MAX;
};

}  // namespace

int64_t LeastTimeBound(Tile tile, OverlapCosts costs) {
  const auto [a, b] = tile;
  // Whatever arrives last unlocks a row, which the Send O of the rows between hide in part, or a column, of
  // which the block in the row that is sent first (in the only row, where a = 1) is exposed.
  const int64_t after_q = std::max<int64_t>(0, b - int64_t{std::max(0, a - 2)} * costs.c_o);
  int64_t exposed = 1;
  if (a > 1) exposed = b > 1 ? std::min<int64_t>(1, after_q) : after_q;
  return std::max<int64_t>(tile.ranks(), CommTime(tile, costs) + exposed);
}

Schedule SearchSchedule(Tile tile, OverlapCosts costs) { return OrderSearch(tile, costs).Run(); }

}  // namespace meshfill
