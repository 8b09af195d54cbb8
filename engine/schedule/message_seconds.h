// What a message takes, where all ranks run in lockstep and up to two messages are under way at once, one
// along the Q rings and one along the KV rings.
#ifndef MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_
#define MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_

#include <algorithm>
#include <array>

namespace meshfill {

// What messages of both rings may be on: the links inside nodes, and the port through which all flows of a
// node leave it.
inline constexpr int kSharedLinks = 2;

// Seconds of a message that is alone in the network, from when it leaves.
struct MessageSeconds {
  struct OnLink {
    double start = 0;  // until the message's bytes begin to move on the link
    double moves = 0;  // from `start` until all bytes have left the link
    bool operator==(const OnLink&) const = default;
  };

  double total = 0;                         // until the message has arrived
  std::array<OnLink, kSharedLinks> shared;  // 0: the rings do not share that link

  bool operator==(const MessageSeconds&) const = default;
};

// A ring's last message.
struct MessageUnderWay {
  double arrives = 0;
  std::array<double, kSharedLinks> left{};  // when it has left the shared links
};

// A message that leaves now, and the other ring's last one. On a link that both are on, its bytes come behind
// the other's, as if the two went one after the other, and its start is beside. The first is taken to have
// the link for itself. Where nobody sees a chunk there is no message, which waits for none.
inline MessageUnderWay Leave(const MessageSeconds& message, double now, const MessageUnderWay& other) {
  MessageUnderWay sent{.arrives = now + message.total};
  for (int link = 0; link < kSharedLinks; ++link) {
    const auto& [start, moves] = message.shared[link];
    if (moves == 0) continue;
    sent.left[link] = std::max(now + start, other.left[link]) + moves;
    sent.arrives = std::max(sent.arrives, sent.left[link]);
  }
  return sent;
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_MESSAGE_SECONDS_H_
