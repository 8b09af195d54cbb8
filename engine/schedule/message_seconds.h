// What a message takes, where all ranks run in lockstep and up to two messages are under way at once, one
// along the Q rings and one along the KV rings.
#ifndef MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_
#define MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_

#include <algorithm>

namespace meshfill {

// From when it leaves, alone.
struct MessageSeconds {
  double total = 0;   // until it has arrived
  double start = 0;   // until its bytes begin to move on the link that both rings have
  double shared = 0;  // until they have left that link; 0: the rings have none in common

  // The last two where the other ring's message is on that link for `busy` more: bytes come behind, as if the
  // two went one after the other, and the start is beside. The first is taken to have the link for itself.
  double SharedBehind(double busy) const { return shared + std::max(0.0, busy - start); }
  double Behind(double busy) const { return std::max(total, SharedBehind(busy)); }

  bool operator==(const MessageSeconds&) const = default;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_
