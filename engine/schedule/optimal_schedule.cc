#include "engine/schedule/optimal_schedule.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/schedule/row_first_builder.h"
#include "engine/schedule/schedule_cost.h"

namespace meshfill {
namespace {

// Which receive an order takes where both lead to least time.
enum class Preference { kKv, kQ, kUnlocked };

// An order, filled with blocks, and which choices between two receives it has made.
struct Order {
  Schedule schedule;
  bool chose_q = false;
  bool chose_kv = false;
};

// What has arrived on a rank, its own chunks included.
struct Node {
  int q = 1;
  int kv = 1;
};

class ReceiveLattice {
 public:
  ReceiveLattice(Tile tile, OverlapCosts costs)
      : a_(tile.a), b_(tile.b), costs_(costs), least_(static_cast<size_t>(a_) * b_) {
    for (int q = a_; q >= 1; --q) {
      for (int kv = b_; kv >= 1; --kv) Least({q, kv}) = LeastFrom({q, kv});
    }
    exposed_ = std::max(Least({}), ShortfallOfAll());
  }

  Order Walk(Preference preference) const {
    Order order;
    RowFirstBuilder builder({.a = a_, .b = b_}, costs_);
    while (builder.q_chunks() < a_ || builder.kv_chunks() < b_ || builder.o_sent() < a_ - 1) {
      const Node here = {builder.q_chunks(), builder.kv_chunks()};
      std::optional<Traffic> next = OnlyNext(builder, here);
      if (!next.has_value()) {
        next = Preferred(here, preference);
        (*next == Traffic::kQ ? order.chose_q : order.chose_kv) = true;
      }
      builder.Append(*next);
    }
    order.schedule = std::move(builder).Finish();
    return order;
  }

 private:
  // nullopt: both receives lead to least time.
  std::optional<Traffic> OnlyNext(const RowFirstBuilder& builder, Node here) const {
    if (MaySendNow(builder, here)) return Traffic::kO;
    if (here.q == a_) return Traffic::kKv;
    if (here.kv == b_) return Traffic::kQ;
    if (!StaysLeast(here, Traffic::kQ)) return Traffic::kKv;
    if (!StaysLeast(here, Traffic::kKv)) return Traffic::kQ;
    return std::nullopt;
  }

  Traffic Preferred(Node here, Preference preference) const {
    switch (preference) {
      case Preference::kKv:
        return Traffic::kKv;
      case Preference::kQ:
        return Traffic::kQ;
      case Preference::kUnlocked:  // Algorithm 2: more blocks for the cost
        return int64_t{here.kv} * costs_.c_kv > int64_t{here.q} * costs_.c_q ? Traffic::kQ : Traffic::kKv;
    }
    return Traffic::kKv;
  }

  // Once all is here the Send O follow. Before, one may go if its row is whole and the Recv Q behind it still
  // leave no more exposed; their shortfall is convex in q, so the first and the last of them decide.
  bool MaySendNow(const RowFirstBuilder& builder, Node here) const {
    if (here.kv < b_ || builder.o_sent() == a_ - 1) return false;
    if (here.q == a_) return true;
    const int row = builder.o_sent() + 1;
    if (row >= here.q || !builder.IsWhole(row)) return false;
    return std::max(Shortfall(here, Traffic::kQ, row), Shortfall({a_ - 1, b_}, Traffic::kQ, row)) <= exposed_;
  }

  bool StaysLeast(Node here, Traffic receive) const {
    return Shortfall(here, receive, 0) <= exposed_ && Least(After(here, receive)) <= exposed_;
  }

  // The least that the worst step from here on leaves exposed.
  int64_t LeastFrom(Node here) const {
    int64_t least = here.q == a_ && here.kv == b_ ? 0 : INT64_MAX;
    for (Traffic receive : {Traffic::kQ, Traffic::kKv}) {
      const Node next = After(here, receive);
      if (next.q > a_ || next.kv > b_) continue;
      least = std::min(least, std::max(Shortfall(here, receive, 0), Least(next)));
    }
    return least;
  }

  // Blocks that are not ready when the receive starts and that nothing behind it hides, after `o_sent` Send
  // O.
  int64_t Shortfall(Node here, Traffic receive, int o_sent) const {
    const Node next = After(here, receive);
    const int64_t hides = int64_t{a_ - next.q} * costs_.c_q + int64_t{b_ - next.kv} * costs_.c_kv;
    return WorstShortfall(here.q, here.kv, hides, o_sent);
  }

  // The shortfall of the whole schedule, if every communication hides as much as it can.
  int64_t ShortfallOfAll() const {
    const int64_t hides = int64_t{a_ - 1} * costs_.c_q + int64_t{b_ - 1} * costs_.c_kv;
    return std::max<int64_t>(0, WorstShortfall(0, 0, hides, 0));
  }

  // Where q·kv blocks are ready and the receives still to come hide `hides`: over rows 1 … k before the k-th
  // Send O, k > o_sent, which is convex in k, so that the first and the last k decide; and over all rows
  // before the end.
  int64_t WorstShortfall(int q, int kv, int64_t hides, int o_sent) const {
    const auto rows = [&](int k) {
      return int64_t{k} * b_ - int64_t{std::min(k, std::max(0, q - 1))} * kv - hides -
             int64_t{k - 1 - o_sent} * costs_.c_o;
    };
    int64_t worst = int64_t{a_} * b_ - int64_t{q} * kv - hides - int64_t{a_ - 1 - o_sent} * costs_.c_o;
    if (o_sent < a_ - 1) worst = std::max({worst, rows(o_sent + 1), rows(a_ - 1)});
    return worst;
  }

  static Node After(Node here, Traffic receive) {
    return receive == Traffic::kQ ? Node{here.q + 1, here.kv} : Node{here.q, here.kv + 1};
  }

  int64_t& Least(Node node) { return least_[static_cast<size_t>(node.q - 1) * b_ + (node.kv - 1)]; }
  int64_t Least(Node node) const { return least_[static_cast<size_t>(node.q - 1) * b_ + (node.kv - 1)]; }

  const int a_;
  const int b_;
  const OverlapCosts costs_;
  std::vector<int64_t> least_;  // [a][b], LeastFrom of each node
  int64_t exposed_ = 0;         // blocks that no communication hides in a schedule of least time
};

}  // namespace

Schedule OptimalSchedule(Tile tile, OverlapCosts costs) {
  const ReceiveLattice lattice(tile, costs);
  Order first = lattice.Walk(Preference::kUnlocked);
  Schedule best = std::move(first.schedule);
  if (!first.chose_q && !first.chose_kv) return best;
  int64_t least_peak = PeakChunkCost(best, costs);
  const auto improve = [&](Preference preference) {
    Schedule schedule = lattice.Walk(preference).schedule;
    const int64_t peak = PeakChunkCost(schedule, costs);
    if (peak >= least_peak) return;
    least_peak = peak;
    best = std::move(schedule);
  };
  // An order that has always chosen as another prefers is that one.
  if (first.chose_q) improve(Preference::kKv);
  if (first.chose_kv) improve(Preference::kQ);
  return best;
}

}  // namespace meshfill
