// Whether a process lives: what /healthz says on the port of /metrics. Kubernetes starts a container anew
// that does not.
//
// Two things show that it does not: its main loop, which beats, has been silent; or what computes stands
// still for far longer than was predicted. A long kernel is neither. A process that still loads has not
// begun to beat, and lives. Thread-safe.
#ifndef MESHFILL_SERVER_OBSERVE_LIVENESS_H_
#define MESHFILL_SERVER_OBSERVE_LIVENESS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "server/observe/http_pages.h"

namespace meshfill {

// What computes, and whether it makes progress. Not thread-safe.
class StandstillWatch {
 public:
  // One of those who compute, as it is now.
  struct At {
    uint64_t run = 0;
    int rank = 0;
    uint64_t moves = 0;            // any count that grows as it gets on
    bool has_to_move = true;       // false: it waits for others, or for its turn
    double predicted_seconds = 0;  // its longest step in which `moves` may stand
  };

  // All who compute now, looked at a few times in a second. What stands still for far longer than was
  // predicted, and longer than two minutes; empty: nothing.
  std::string Look(const std::vector<At>& all, absl::Time now);

 private:
  struct Seen {
    uint64_t moves = 0;
    absl::Time moved_at;
  };
  std::map<std::pair<uint64_t, int>, Seen> seen_;  // by run and rank
};

class Liveness {
 public:
  using Clock = std::function<absl::Time()>;
  static constexpr absl::Duration kLongestSilence = absl::Seconds(30);

  explicit Liveness(Clock clock = MonotonicNow) : clock_(std::move(clock)) {}

  // From the main loop, several times in a second. `standstill`: what stands still for too long; empty:
  // nothing.
  void Beat(std::string standstill);

  std::string Trouble() const;  // why the process does not live; empty: it does
  HttpPage Page() const;        // /healthz. This outlives the page.

 private:
  const Clock clock_;
  mutable Mutex mu_;
  absl::Time last_beat_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // infinite: none yet
  std::string standstill_ ABSL_GUARDED_BY(mu_);
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_LIVENESS_H_
