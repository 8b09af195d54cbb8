// What a rank has under way along its rings after each step of a schedule, and what of it has ended.
// CheckSchedule asks it, on purpose apart from schedule_walk.h and KvHopOf: a check by what runs the schedule
// would find no mistake of that.
#ifndef MESHFILL_ENGINE_SCHEDULE_RINGS_UNDER_WAY_H_
#define MESHFILL_ENGINE_SCHEDULE_RINGS_UNDER_WAY_H_

#include <array>
#include <optional>

#include "engine/schedule/schedule.h"

namespace meshfill {

class RingsUnderWay {
 public:
  struct UnderWay {
    std::optional<Traffic> comm;  // none: nothing is
    int last_step = 0;
    int index = 0;  // of the Q or KV that comes, or the O that leaves
  };

  // CanSplitKvRing has passed.
  RingsUnderWay(Tile tile, int kv_inner)
      : inner_hops_(kv_inner == 0 ? tile.b - 1 : kv_inner - 1),
        rounds_(kv_inner == 0 ? 1 : tile.b / kv_inner) {}

  // The ring of the next communication of its kind.
  Ring RingOf(Traffic comm) const {
    if (comm != Traffic::kKv) return Ring::kQ;
    return kv_started_ < (rounds_ - 1) * (inner_hops_ + 1) && kv_started_ % (inner_hops_ + 1) == 0
               ? Ring::kKvOuter
               : Ring::kKv;
  }
  const UnderWay& Along(Ring ring) const { return rings_[static_cast<int>(ring)]; }

  // Whether what the next Recv KV sends is here. In a ring the one before has brought it, but for the first
  // chunk of a round, which the outer ring has.
  bool HasToSend(Ring ring) const {
    if (ring != Ring::kKv || inner_started_ % inner_hops_ != 0) return true;
    return outer_received_ >= inner_started_ / inner_hops_;
  }

  // Whether KV#v is here.
  bool HasKv(int v) const {
    const int round = v / (inner_hops_ + 1), hop = v % (inner_hops_ + 1);
    if (hop == 0) return round <= outer_received_;
    return round * inner_hops_ + hop <= inner_received_;
  }

  // A communication of so many steps, where nothing is along its ring.
  void Start(Traffic comm, int step, int spans) {
    const Ring ring = RingOf(comm);
    rings_[static_cast<int>(ring)] = {
        .comm = comm, .last_step = step + spans - 1, .index = IndexOf(ring, comm)};
    kv_started_ += comm == Traffic::kKv ? 1 : 0;
    inner_started_ += ring == Ring::kKv ? 1 : 0;
  }

  // What ends with this step.
  void End(int step) {
    for (const Ring ring : {Ring::kQ, Ring::kKv, Ring::kKvOuter}) {
      UnderWay& along = rings_[static_cast<int>(ring)];
      if (!along.comm.has_value() || along.last_step > step) continue;
      q_received_ += along.comm == Traffic::kQ ? 1 : 0;
      o_sent_ += along.comm == Traffic::kO ? 1 : 0;
      inner_received_ += ring == Ring::kKv ? 1 : 0;
      outer_received_ += ring == Ring::kKvOuter ? 1 : 0;
      along.comm.reset();
    }
  }

  int q_received() const { return q_received_; }
  int kv_started() const { return kv_started_; }
  int kv_received() const { return inner_received_ + outer_received_; }
  int o_sent() const { return o_sent_; }

 private:
  int IndexOf(Ring ring, Traffic comm) const {
    const int round = inner_hops_ + 1;
    if (comm == Traffic::kQ) return q_received_ + 1;
    if (comm == Traffic::kO) return o_sent_ + 1;
    if (ring == Ring::kKvOuter) return round * (outer_received_ + 1);
    return inner_started_ / inner_hops_ * round + inner_started_ % inner_hops_ + 1;
  }

  const int inner_hops_;  // of a round; 0: there is one rank
  const int rounds_;
  std::array<UnderWay, kRings> rings_;
  int q_received_ = 0;
  int kv_started_ = 0;
  int inner_started_ = 0;
  int inner_received_ = 0;
  int outer_received_ = 0;
  int o_sent_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_RINGS_UNDER_WAY_H_
