// Begins runs for the requests that wait: the oldest whose turn it is, as many as may live and have room.
//
// Part of the leader's state machine (leader.h). Not thread-safe.
#ifndef MESHFILL_SERVER_POOL_RUN_STARTER_H_
#define MESHFILL_SERVER_POOL_RUN_STARTER_H_

#include <cstdint>

#include "absl/time/time.h"
#include "server/pool/leader_actions.h"
#include "server/pool/link_survey.h"
#include "server/pool/live_runs.h"
#include "server/pool/membership.h"
#include "server/pool/run_coordinator.h"
#include "server/pool/run_placer.h"

namespace meshfill {

class RunStarter {
 public:
  struct Options {
    int runs_at_once = 1;  // that live, of which a pack is one
    int layers = 1;
    int64_t vocab = 1;
    absl::Duration hang_timeout;  // this and those below: as RunCoordinator has them
    absl::Duration prepare_timeout;
    absl::Duration stop_timeout;
  };

  // All outlive this.
  RunStarter(const Options& options, Membership& members, LinkSurvey& survey, LiveRuns& live,
             RunPlacer& placer, LeaderActions& actions);

  // Called once something has ended: begins as many runs as may live, and tells who stands still.
  void StartWaiting(absl::Time now);
  // Begins a run for a request that waits, or answers it, or finds that there is no room now.
  void Start(LeaderActions::Ticket ticket, absl::Time now);
  // Whether one more may live.
  bool MayStart() const { return live_.count() < options_.runs_at_once; }
  uint64_t retries() const { return retries_; }  // attempts at a request after the first one

 private:
  void BeginAttempt(LiveRequest& request, absl::Time now);

  const Options options_;
  Membership& members_;
  LinkSurvey& survey_;
  LiveRuns& live_;
  RunPlacer& placer_;
  LeaderActions& actions_;
  RunId last_run_ = 0;
  uint64_t retries_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_RUN_STARTER_H_
