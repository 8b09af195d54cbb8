// What messages take, where all ranks run in lockstep and several are under way at once, one along each ring.
//
// On a link that several are on, flows share its bandwidth evenly, as TCP's and the simulator's do: a message
// with two flows through a node's port has two thirds of it beside one with one flow.
#ifndef MESHFILL_ENGINE_SCHEDULE_MESSAGES_UNDER_WAY_H_
#define MESHFILL_ENGINE_SCHEDULE_MESSAGES_UNDER_WAY_H_

#include <array>
#include <optional>

#include "engine/mesh/mesh.h"

namespace meshfill {

// What messages of several rings may be on: the links inside nodes, and the port through which all flows of a
// node leave it.
inline constexpr int kSharedLinks = 2;

// Seconds of a message that is alone in the network, from when it leaves.
struct MessageSeconds {
  struct OnLink {
    double start = 0;  // until the message's bytes begin to move on the link
    double moves = 0;  // from `start` until all bytes have left the link, if nothing else slows them
    double flows = 1;  // its share beside others is by their number, in any unit
    bool operator==(const OnLink&) const = default;
  };

  double total = 0;                         // until the message has arrived
  std::array<OnLink, kSharedLinks> shared;  // moves of 0: no other ring has that link

  bool operator==(const MessageSeconds&) const = default;
};

// The last message along each ring. Time goes forward from call to call.
class MessagesUnderWay {
 public:
  // Where the one before along the ring has arrived. Where nobody sees a chunk there is no message: all its
  // seconds are 0, and it has arrived.
  void Leave(Ring ring, const MessageSeconds& message, double now);

  // When the ring's last message arrives, unless more leave before. It may be in the past.
  double ArrivalOf(Ring ring);

 private:
  // A message on one of the links that rings share.
  struct Share {
    double begins = 0;
    double left = 0;   // part of its bytes that are still to move, from 1 down
    double alone = 0;  // seconds of all its bytes, where nothing else is on the link
    double moves = 0;  // MessageSeconds::OnLink's
    double flows = 0;
    double ended = 0;  // where nothing is left
  };
  using Shares = std::array<std::array<Share, kSharedLinks>, kRings>;

  // Moves bytes from `now` to `until`, or until no more of the ring's are left.
  static void Move(Shares& shares, double now, double until, const Ring* ring);

  Shares shares_ = {};
  std::array<double, kRings> least_arrival_ = {};  // of a message that has its links for itself
  std::array<bool, kRings> alone_ = {};            // whether the ring's last message has them, so far
  // Of those that do not, once it was asked for; none after a message has left.
  std::array<std::optional<double>, kRings> arrivals_;
  double now_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_MESSAGES_UNDER_WAY_H_
