// The ranks of one run that live in this process: a thread each.
//
// The object belongs to one thread; the callbacks are called on the ranks' threads. Nothing here ends a rank
// early: whoever stops a run raises the stop token of its streams and aborts its communicators.
#ifndef MESHFILL_ENGINE_RUN_LOCAL_RANKS_H_
#define MESHFILL_ENGINE_RUN_LOCAL_RANKS_H_

#include <functional>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_runner.h"

namespace meshfill {

// The longest time that a rank waits for a peer. A healthy run never waits so long, and a lost peer is
// noticed sooner by others: the timeout ends a run after a bug, or where the leader is gone, too.
absl::Duration PeerWaitTimeout(const Plan& plan);

// The status that explains the others: a rank's own failure, not the abort that it caused elsewhere. OK where
// none failed.
absl::Status FirstCause(const std::vector<absl::StatusOr<RankOutput>>& outputs);

class LocalRanks {
 public:
  using Run = std::function<absl::StatusOr<RankOutput>(int index)>;
  using Done = std::function<void(int index, absl::StatusOr<RankOutput> output)>;

  LocalRanks() = default;
  ~LocalRanks() { Join(); }
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  // Once. The thread of each of `ranks` ranks calls `run` and hands what it returns to `done`. Where no
  // thread can be started, `done` is called here and now, with RESOURCE_EXHAUSTED.
  void Start(int ranks, Run run, Done done);
  // Waits until every rank is done. Nothing where nothing was started, or all have been joined.
  void Join();

 private:
  Run run_;
  Done done_;
  std::vector<std::thread> threads_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_LOCAL_RANKS_H_
