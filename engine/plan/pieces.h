// A prompt whose activations do not fit the memory runs in pieces that do: consecutive tokens, one run after
// the other, each behind the K and V of those before it, which stay.
//
//     piece 0    tokens 0 … p−1       after the cached tokens, if any
//     piece 1    tokens p … 2p−1      after p more
//     …          the last one may be shorter
//
// A longer piece needs more memory, and attends in fewer, larger blocks: the longest that fits is taken.
#ifndef MESHFILL_ENGINE_PLAN_PIECES_H_
#define MESHFILL_ENGINE_PLAN_PIECES_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/plan/planner.h"

namespace meshfill {

inline constexpr int64_t kMostPieces = 256;

// A stripe for each rank, whatever stripe was asked for: longer ones than any prompt count as such.
int64_t RoundTokens(int ranks, int64_t stripe);

// MakePlan, and where it finds that the prompt does not fit: in pieces of a multiple of `granule_tokens`, in
// which whole rounds of all ranks' stripes lie. Errors: MakePlan's; FAILED_PRECONDITION: not even in pieces,
// of which there are kMostPieces at most, or in a layout that a piece cannot follow.
absl::StatusOr<PlanChoice> MakePlanInPieces(const ModelShape& model, const PoolSpeed& speed,
                                            const PlanRequest& request, int64_t granule_tokens);

// FAILED_PRECONDITION: the choice for `request` is in pieces, and K and V of its tokens, which stay between
// them, take more than what there is for kept ones, whoever holds it now.
absl::Status CheckKvOfPieces(const ModelShape& model, const PlanRequest& request, const PlanChoice& choice,
                             int64_t kv_budget_bytes);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PIECES_H_
