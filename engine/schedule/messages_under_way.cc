#include "engine/schedule/messages_under_way.h"

#include <algorithm>
#include <limits>

namespace meshfill {
namespace {

// The part of a message that rounding may leave.
constexpr double kNothing = 1e-9;

int Index(Ring ring) { return static_cast<int>(ring); }

}  // namespace

void MessagesUnderWay::Leave(Ring ring, const MessageSeconds& message, double now) {
  Move(shares_, now_, now, nullptr);
  now_ = now;
  least_arrival_[Index(ring)] = now + message.total;
  alone_[Index(ring)] = true;
  arrivals_ = {};
  for (int link = 0; link < kSharedLinks; ++link) {
    const auto& [start, moves, flows] = message.shared[link];
    Share& share = shares_[Index(ring)][link];
    share = {};
    if (moves == 0) continue;
    share = {.begins = now + start,
             .left = 1,
             .alone = std::max(moves, message.total - start),
             .moves = moves,
             .flows = flows};
    for (int other = 0; other < kRings; ++other) {
      if (other == Index(ring)) continue;
      Share& beside = shares_[other][link];
      if (beside.left < kNothing) {
        beside.left = 0;
        continue;
      }
      alone_[other] = alone_[Index(ring)] = false;
    }
  }
}

double MessagesUnderWay::ArrivalOf(Ring ring) {
  double arrives = least_arrival_[Index(ring)];
  if (alone_[Index(ring)]) return arrives;
  std::optional<double>& known = arrivals_[Index(ring)];
  if (known.has_value()) return *known;
  Shares shares = shares_;
  Move(shares, now_, std::numeric_limits<double>::infinity(), &ring);
  for (const Share& share : shares[Index(ring)]) arrives = std::max(arrives, share.ended);
  known = arrives;
  return arrives;
}

void MessagesUnderWay::Move(Shares& shares, double now, double until, const Ring* ring) {
  // Until the next share begins or has nothing left, each moves at its rate.
  while (now < until) {
    std::array<double, kSharedLinks> flows = {};
    double next = until;
    bool any = false, any_of_ring = false;
    for (int of = 0; of < kRings; ++of) {
      for (int link = 0; link < kSharedLinks; ++link) {
        const Share& share = shares[of][link];
        if (share.left == 0) continue;
        any = true;
        any_of_ring |= ring != nullptr && of == Index(*ring);
        if (share.begins > now) next = std::min(next, share.begins);
        if (share.begins <= now) flows[link] += share.flows;
      }
    }
    if (!any || (ring != nullptr && !any_of_ring)) return;
    const auto seconds = [&](const Share& share, int link) {
      return std::max(share.alone, share.moves * flows[link] / share.flows);
    };
    const auto moving = [&](auto&& visit) {
      for (auto& of_ring : shares) {
        for (int link = 0; link < kSharedLinks; ++link) {
          Share& share = of_ring[link];
          if (share.left > 0 && share.begins <= now) visit(share, seconds(share, link));
        }
      }
    };
    moving([&](const Share& share, double all) { next = std::min(next, now + share.left * all); });
    moving([&](Share& share, double all) {
      const bool ends = now + share.left * all <= next;
      share.left = ends ? 0 : share.left - (next - now) / all;
      if (ends) share.ended = next;
    });
    now = next;
  }
}

}  // namespace meshfill
