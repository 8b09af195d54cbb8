// Waits that were too long for requests a moment ago, for those that come next and would wait no less: to
// predict each one's by itself costs a look at all that wait, and a flood of refusals would have the queue do
// nothing else.
//
//     refused: tenant a, class 0, 30 s of work, deadline in 60 s; 45 s of waiting
//     next:    tenant a, class 0, 50 s of work, deadline in 60 s  ──► waits 45 s at least: not predicted anew
//              tenant a, class 0, 10 s of work                    ──► shorter ones come first: predicted
//              tenant a, class 1                                  ──► a higher class: predicted
//              tenant b                                           ──► has a share of its own: predicted
//
// Not thread-safe. Part of QueueRoom.
#ifndef MESHFILL_SERVER_QUEUE_REFUSED_WAITS_H_
#define MESHFILL_SERVER_QUEUE_REFUSED_WAITS_H_

#include <vector>

#include "absl/time/time.h"
#include "server/queue/run_entry.h"

namespace meshfill {

// At most 1/20 of the time goes to what refusals are told.
inline constexpr int kRefusalsShare = 20;

class RefusedWaits {
 public:
  // At least so many seconds such a request waits, as far as others have heard; 0: nothing is known.
  double LeastSeconds(const RunJob& job, absl::Time now);
  // One was refused that would have waited for `seconds`; the prediction took from `begin` to `end`, and
  // counts for kRefusalsShare times as long.
  void Add(const RunJob& job, double seconds, absl::Time begin, absl::Time end);

 private:
  struct Refused {
    RunJob job;
    double seconds = 0;
    absl::Time until;
  };
  // As many as are predicted within kRefusalsShare predictions.
  std::vector<Refused> refused_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_REFUSED_WAITS_H_
