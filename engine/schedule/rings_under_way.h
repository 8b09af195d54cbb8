// What a rank has under way along its two rings after each step of a schedule, and what of it has ended.
// CheckSchedule asks it, on purpose apart from schedule_walk.h: a check by the walk that runs the schedule
// would find no mistake of that walk.
#ifndef MESHFILL_ENGINE_SCHEDULE_RINGS_UNDER_WAY_H_
#define MESHFILL_ENGINE_SCHEDULE_RINGS_UNDER_WAY_H_

#include <optional>

#include "engine/schedule/schedule.h"

namespace meshfill {

struct RingsUnderWay {
  struct Ring {
    std::optional<Traffic> comm;  // none: nothing is
    int last_step = 0;
  };

  Ring& Along(Traffic comm) { return comm == Traffic::kKv ? along_kv : along_q; }

  // The step's communication, if it has one, where nothing is along its ring.
  void Start(const Step& step, int number) {
    if (!step.comm.has_value()) return;
    Along(*step.comm) = {.comm = step.comm, .last_step = number + step.spans - 1};
  }

  // What ends with this step.
  void End(int number) {
    for (Ring* const ring : {&along_q, &along_kv}) {
      if (!ring->comm.has_value() || ring->last_step > number) continue;
      q_received += ring->comm == Traffic::kQ ? 1 : 0;
      kv_received += ring->comm == Traffic::kKv ? 1 : 0;
      o_sent += ring->comm == Traffic::kO ? 1 : 0;
      ring->comm.reset();
    }
  }

  Ring along_q;
  Ring along_kv;
  int q_received = 0;
  int kv_received = 0;
  int o_sent = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_RINGS_UNDER_WAY_H_
