// A prefill in the order of turns (run_order.h): what was told of it, and how far it is.
#ifndef MESHFILL_SERVER_QUEUE_RUN_ENTRY_H_
#define MESHFILL_SERVER_QUEUE_RUN_ENTRY_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "server/config/priority_class.h"

namespace meshfill {

inline constexpr double kRestToSpare = 1.25;  // of a rest, before a deadline

using RunTicket = uint64_t;  // names a prefill; above 0, rising

struct RunJob {
  std::string tenant;
  int priority = 0;         // higher first; ClassOf bounds it
  double work_seconds = 0;  // predicted, on all devices
  double weight = 1;        // the tenant's weight: 2 gets twice the seconds of 1
  absl::Time deadline = absl::InfiniteFuture();
  std::vector<SubmeshSeconds> submeshes = {};  // sub-meshes that it may run on; none: on all devices alone
  PackShare pack = {};                         // what it brings to a pass that it shares with others
  double may_save_seconds = 0;  // of its work, at most, by what is cached; known once it is complete

  // Predicted, on one of so many sub-meshes. 1: on all devices. Infinite: it does not run there.
  double SecondsOn(int of_submeshes) const;
};

enum class RunState { kUploading, kWaiting, kLive };

struct RunEntry {
  RunJob job;
  RunState state = RunState::kUploading;
  bool paid = false;      // it uploads, and others wait for it (RunOrder::Pay)
  bool leaving = false;   // it is being stopped
  bool put_back = false;  // it waits for memory
  bool apart = false;     // its pass had no memory: it shares none until another one ends
  bool urgent = false;    // once it could wait no longer, for good
  absl::Time complete_at = absl::InfiniteFuture();
  bool computes = false;
  int submeshes = 1;        // it lives on one of so many
  uint64_t place = 0;       // there; 0: not known
  uint64_t pack = 0;        // it lives in this one, with others of the same number; 0: in none
  absl::Duration computed;  // before `since`, where it computes
  absl::Time since;         // it computes since then
  // Predicted, on what it has: its submeshes, or the pass that it shares.
  double whole_seconds = 0;
  double rest_seconds = 0;  // when it had computed `measured_at`
  absl::Duration measured_at;
  bool anew = false;             // its run was begun anew, and has not said how far it is
  absl::Duration computed_lost;  // of what it has computed: by runs that were begun anew

  absl::Duration Computed(absl::Time now) const;
  double Rest(absl::Time now) const;  // seconds, predicted, on what it has
  // The same as if it ran on all devices alone, so that what runs on a sub-mesh or in a pack seems no longer
  // than it was.
  double RestOnAll(absl::Time now) const;
  bool CanMeetDeadline(absl::Time now) const;
  bool IsUrgent(absl::Time now) const { return urgent && CanMeetDeadline(now); }
  // For so long it has waited or stood still, since it is complete.
  absl::Duration Stood(absl::Time now) const {
    return std::max(absl::ZeroDuration(), now - complete_at - Computed(now));
  }
  bool IsOlder(absl::Duration age, absl::Time now) const { return Stood(now) > age; }
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_RUN_ENTRY_H_
