// Plans over a pool whose size changes: how many of its ranks to use, and how.
#ifndef MESHFILL_SERVER_POOL_POOL_PLANNER_H_
#define MESHFILL_SERVER_POOL_POOL_PLANNER_H_

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine_options.h"
#include "engine/mesh/topology.h"
#include "engine/prefill_engine.h"
#include "meshfill/v1/config.pb.h"
#include "server/pool/kv_directory.h"
#include "server/pool/link_survey.h"
#include "server/pool/membership.h"

namespace meshfill {

// The links that the config gives. What it leaves out is assumed: 1e9 bytes/s and 200us between hosts, the
// same on a host, and nothing shared. Without seats.
Topology TopologyOf(const v1::PoolSection& pool);

// The same, and which classes it leaves to be measured: those with neither bytes/s nor latency.
ConfiguredLinks ConfiguredLinksOf(const v1::PoolSection& pool);

// The weights as plans count them where all workers share them. `one`: one worker's whole weights.
// `node_of_worker`: as RingLink has it.
PlanWeights SharedWeightsOf(const PlanWeights& one, const Topology& topology,
                            const std::vector<int>& node_of_worker);

// FAILED_PRECONDITION where one worker alone is to share weights, or `memory_bytes_left`, of a rank beside
// its worker's share, is below 0: the share does not fit.
absl::Status CheckShares(const PlanWeights& one, int workers, int64_t memory_bytes_left);

// The plan of least predicted time among those for all ranks and for up to a quarter fewer: of 7 ranks left,
// 1×7, 7×1 or a mesh of 6 with one idle. A tile that the caller fixed is for all ranks. `defaults`: layout,
// stripe and so on where the request leaves them open. Behind what is cached of the prompt, on the ranks that
// have it, where that is faster. A prompt that fits no such number of ranks whole runs in pieces on all of
// them. Workers that share weights all take part. Room for short prompts is left where that is possible.
// CheckPromptOptions has passed. Errors: those of MakePlanInPieces and CheckKvOfPieces; UNAVAILABLE where the
// pool has no ranks; FAILED_PRECONDITION where one worker has nobody to share weights with, or too few do.
absl::StatusOr<PlanChoice> PlanForPool(const ModelShape& model, const EngineOptions& defaults,
                                       const PoolCapacity& capacity, int64_t tokens,
                                       const PrefillOptions& options, const CachedPrefix& cached = {});

// The fastest of what `plan` plans on all of the pool and on each of its faster parts, where the others are
// idle. A tile that the caller fixed is for all ranks, and workers that share weights all take part. Errors:
// those of the plan on all, where no part has a plan.
absl::StatusOr<PlanChoice> PlanOnFastest(
    const PoolCapacity& capacity, const PrefillOptions& options,
    const std::function<absl::StatusOr<PlanChoice>(const PoolCapacity& part)>& plan);

// How many of the tokens that are cached of a prompt of `tokens` a run can reuse.
int64_t UsableTokensOf(const CachedPrefix& cached, const EngineOptions& defaults, int64_t tokens,
                       const PrefillOptions& options);

// Bytes of each rank that long prompts leave to short ones. `rank`: of one rank.
int64_t ShortRoomOf(const ModelShape& model, const EngineOptions& defaults, const PoolCapacity& rank);

// Whether `other` is to run instead of `best`: it is possible, and faster, or the only one that is.
bool IsFaster(const absl::StatusOr<PlanChoice>& other, const absl::StatusOr<PlanChoice>& best);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_POOL_PLANNER_H_
