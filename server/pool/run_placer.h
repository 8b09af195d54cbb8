// What a request runs next, and where: on the whole pool, on one of its sub-meshes, or on the workers that
// have what is cached of its prompt; all of the prompt, or its next piece.
//
//     pieces begun? ── the next one, on their workers
//          │ no
//     in a pack? ───── its rank
//          │ no
//     sub-meshes? ──── the one on which fewest compute, of these one that has what is cached of the prompt
//          │ none has room
//     the whole pool, or the workers that have the prefix, where that is faster
//
// Part of the leader's state machine (leader.h). Not thread-safe.
#ifndef MESHFILL_SERVER_POOL_RUN_PLACER_H_
#define MESHFILL_SERVER_POOL_RUN_PLACER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/plan.h"
#include "engine/prefill_engine.h"
#include "server/pool/kv_directory.h"
#include "server/pool/link_survey.h"
#include "server/pool/live_runs.h"
#include "server/pool/membership.h"

namespace meshfill {

// Chooses how many of the ranks to use, and their plan: behind what is cached of the prompt, where that is
// faster. A pure function.
using PoolPlanner = std::function<absl::StatusOr<PlanChoice>(
    const PoolCapacity& capacity, int64_t tokens, const PrefillOptions& options, const CachedPrefix& cached)>;

// Workers that a prompt may be planned on, and what these have of it.
struct PlanSite {
  PoolCapacity capacity;
  CachedPrefix cached;
};

struct PlacedRun {
  HeldRuns::Workers workers;  // by place; the plan has ranks for as many of the first
  Plan plan;
  bool shares_weights;
  KvDirectory::RunKv kv;
};

class RunPlacer {
 public:
  // All outlive the placer.
  RunPlacer(PoolPlanner planner, const Membership& members, const LinkSurvey& survey, const LiveRuns& live,
            KvDirectory& kv);

  // Plans the run, and charges its K and V to its workers. Nothing: there is no memory beside the runs that
  // live. Errors: the planner's, and those of KvDirectory::BeginRun.
  absl::StatusOr<std::optional<PlacedRun>> Place(RunId run, LiveRequest& live);
  // Whom a run of the request may take: who is there to stay, or who has its pieces.
  HeldRuns::Workers WorkersFor(const LiveRequest& live) const;
  // Keeps what a request has of its prompt in pieces, and their room, after a run of it that failed.
  void KeepPieces(LiveRequest& live);
  // The worker that has the pool's rank of that number, and which of its ranks that is. None: it is gone.
  std::optional<std::pair<LeaderActions::Connection, int>> PlaceOfRank(int rank) const;
  // What predictions of a request with these options plan on, as Place does with nothing beside it: the
  // fastest counts. The whole pool, and the workers that have what is cached of the prompt, where these are
  // not the pool's first; or a sub-mesh. Not empty.
  std::vector<PlanSite> SitesFor(const PrefillOptions& options) const;
  // From now on long runs leave so much of each rank to short ones (engine/plan/short_room.h).
  void LeaveToShort(int64_t rank_bytes) { short_rank_bytes_ = rank_bytes; }
  // The most that one more run on one rank of each worker could take there now.
  int64_t MostRankBytes() const;
  // Of any one rank, beside others that compute. None: prompts share no pass in this pool, as a worker's rows
  // depend on what is beside them, or its weights are not all there.
  std::optional<PoolCapacity> RankCapacity() const;
  // Of the one of so many sub-meshes that computes least in a second: the smallest, where all workers are as
  // fast. None: there are fewer workers, or they share weights.
  std::optional<PoolCapacity> SubmeshCapacity(int submeshes) const;

 private:
  // On one of its sub-meshes. Nothing: on none of them.
  std::optional<PlacedRun> PlaceOnSubmesh(RunId run, LiveRequest& live, KvSlabs& prefix);
  // On the whole pool, or on the workers that have the prefix.
  absl::StatusOr<std::optional<PlacedRun>> PlaceBehind(RunId run, LiveRequest& live, KvSlabs& prefix);
  absl::StatusOr<std::optional<PlacedRun>> PlaceNextPiece(RunId run, LiveRequest& live);
  // On its rank of its pack, behind nothing that is cached. FAILED_PRECONDITION: it is too long by now.
  absl::StatusOr<std::optional<PlacedRun>> PlaceInPack(RunId run, LiveRequest& live);
  // Lets go of a prefix that the choice is not behind: others may need its room.
  absl::StatusOr<std::optional<PlacedRun>> Begin(RunId run, LiveRequest& live, PlanChoice choice,
                                                 KvSlabs& prefix, HeldRuns::Workers workers);
  absl::StatusOr<PlanChoice> PlanOn(const HeldRuns::Workers& workers, const LiveRequest& live,
                                    const KvSlabs& prefix) const;
  PoolCapacity CapacityOn(const HeldRuns::Workers& workers) const;
  // Who of `all` has the prefix, where a run on all could not be behind it. Empty: nobody, or one can.
  HeldRuns::Workers HoldersElsewhere(const KvSlabs& prefix, const HeldRuns::Workers& all) const;
  // The request's sub-meshes, the one that it is to take first. Empty: it runs on the whole pool.
  std::vector<HeldRuns::Workers> SubmeshesFor(const LiveRequest& live, const KvSlabs& prefix) const;
  bool SharesAllWeights() const;  // the workers do, in each run
  bool HasRoom(const Plan& plan, const HeldRuns::Workers& workers, bool shares_weights) const;

  const PoolPlanner planner_;
  const Membership& members_;
  const LinkSurvey& survey_;
  const LiveRuns& live_;
  KvDirectory& kv_;
  int64_t short_rank_bytes_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_RUN_PLACER_H_
