// What the end of a run means for its request: answered, tried again, or refused as poisonous.
//
//     a run completes ─────────────────────────► answered; the next piece waits for its turn
//     it fails, or loses a worker ── blame ────► waits again, once its workers have stopped, or is refused
//     its request is answered without it ──────► its ranks stop, once nobody wants what they compute
//
// Requests of a pack that are on one rank share its pass: what ends one run ends theirs.
//
// Part of the leader's state machine (leader.h), whose invariants say who is blamed. Not thread-safe.
#ifndef MESHFILL_SERVER_POOL_RUN_ENDER_H_
#define MESHFILL_SERVER_POOL_RUN_ENDER_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/pool/ended_epochs.h"
#include "server/pool/kv_directory.h"
#include "server/pool/leader_actions.h"
#include "server/pool/live_runs.h"
#include "server/pool/membership.h"
#include "server/pool/run_coordinator.h"
#include "server/pool/run_placer.h"

namespace meshfill {

class RunEnder {
 public:
  // A run may have computed in an epoch's end that shows `silence_timeout` later. All others outlive this.
  RunEnder(absl::Duration silence_timeout, Membership& members, LiveRuns& live, RunPlacer& placer,
           KvDirectory& kv, LeaderActions& actions);

  // Answers the run's request, where it lives, unless it has more pieces.
  void Complete(RunId run, absl::StatusOr<RunResult> result, absl::Time now);
  // Stops the run, and those that share its pass: their requests go again (where they still live), unless
  // they are poisonous.
  void EndEpoch(RunId run, const std::string& why, bool lost_workers, absl::Time now);
  // Its answer is out, or it has none: the ranks stop.
  void Cancel(LiveRun& run, absl::Time now);
  // Its answer is out: the ranks stop, once nobody wants what they compute.
  void Leave(RunId run, absl::Time now);
  // Requests of runs whose workers have confirmed the end wait again, and who drained for them may go.
  void ForgetStopped();

 private:
  void EndEpochOf(RunId run, const std::string& why, bool lost_workers, absl::Time now);
  // Those of a pass that has ended: nobody wants what is left of it.
  void CancelUnwanted(const std::vector<RunId>& in_pass, absl::Time now);
  // What an end of the run says of its prompt; nothing: it did not compute.
  std::optional<EpochEnd> EndOf(const RunCoordinator& run, absl::Time now) const;
  // An epoch has ended in the request's run; why it is poisonous, or empty.
  std::string Blame(LiveRequest& request, const EpochEnd& end);

  const absl::Duration silence_timeout_;
  Membership& members_;
  LiveRuns& live_;
  RunPlacer& placer_;
  KvDirectory& kv_;
  LeaderActions& actions_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_RUN_ENDER_H_
