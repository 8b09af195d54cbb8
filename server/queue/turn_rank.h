// What the order of turns compares (run_order.h), at one moment, and the order that it makes of that.
#ifndef MESHFILL_SERVER_QUEUE_TURN_RANK_H_
#define MESHFILL_SERVER_QUEUE_TURN_RANK_H_

#include <limits>
#include <vector>

#include "absl/time/time.h"
#include "server/queue/run_entry.h"

namespace meshfill {

struct TurnRank {
  RunTicket ticket = 0;
  bool lives = false;
  bool may_compute = false;  // it lives, or has a place where it may begin
  bool put_back = false;     // it waits for memory
  bool computes = false;
  bool stays = false;  // it lives, and no other can
  bool aged = false;   // it has waited for max_age
  int priority = 0;
  bool urgent = false;
  absl::Time deadline;
  double work_seconds = 0;  // on all devices, as its rest
  double rest_seconds = 0;
  double weighted_rest = 0;
  absl::Time complete_at;

  bool Before(const TurnRank& other) const;  // whatever their ages
  bool IsOlder(const TurnRank& other) const;
};

// The oldest prefill that has waited for max_age and may compute; none that would begin before an older one
// of them that waits for memory. Where there is none, they wait for the end of another: the first that lives
// stands in for them.
struct Elder {
  RunTicket ticket = 0;  // 0: nothing has waited for so long
  // For so long others may go before it: what it has computed as the elder, less what others have since then
  // while it stood still.
  double credit_seconds = 0;
};

struct Ranking {
  std::vector<RunTicket> tickets;  // the first to compute first
  // The elder's credit changes nobody's turn for so long. The first one may end then.
  double holds_seconds = std::numeric_limits<double>::infinity();
};

// A new elder has no credit. What goes before an elder keeps its turn though it takes a little longer than
// the credit.
Ranking RankByTurns(std::vector<TurnRank> ranks, Elder& elder);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_TURN_RANK_H_
