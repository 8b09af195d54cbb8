// What a message takes, where all ranks run in lockstep and up to two messages are under way at once, one
// along the Q rings and one along the KV rings.
#ifndef MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_
#define MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_

#include <algorithm>

namespace meshfill {

struct MessageSeconds {
  double start = 0;  // until its bytes begin to move
  double total = 0;  // until it has arrived, alone

  // From when it leaves, where one that takes `busy` more is on the same links: its bytes come behind, as if
  // the two went one after the other, and its start is beside. The first is taken to have the links for
  // itself.
  double Behind(double busy) const { return total + std::max(0.0, busy - start); }
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_
