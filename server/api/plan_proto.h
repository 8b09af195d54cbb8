// Between the API's plan messages and the engine's values.
#ifndef MESHFILL_SERVER_API_PLAN_PROTO_H_
#define MESHFILL_SERVER_API_PLAN_PROTO_H_

#include "absl/status/statusor.h"
#include "engine/prefill_engine.h"
#include "meshfill/v1/prefill.pb.h"

namespace meshfill {

// INVALID_ARGUMENT for a value that no plan can have: a tile without rows or columns, an unknown layout.
// Whether a plan fits the pool is the engine's to say.
absl::StatusOr<PrefillOptions> ToPrefillOptions(const v1::PlanOptions& options);
// What `options` fix of the plan.
v1::PlanOptions PlanOptionsOf(const PrefillOptions& options);

// The tokens that a message counts. OUT_OF_RANGE where no int64_t holds them: no model has such a context.
absl::StatusOr<int64_t> ToTokenCount(uint64_t tokens, const PrefillEngine& engine);

// What runs, in how many pieces.
v1::PlanSummary SummaryOf(const PlanChoice& choice);

v1::PlanReply ToProto(const PlanChoice& choice);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_PLAN_PROTO_H_
