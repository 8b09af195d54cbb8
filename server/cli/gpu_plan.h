// Plans for GPUs that are not here: what a prompt would take on a cluster that a scenario describes, and how
// the weights would fit.
//
// Each GPU is a rank, and a node a worker, or the one process of an embedded pool. Rates are the scenario's,
// whatever is computed: a product of experts has its share of that of others, however few tokens come to an
// expert, and a block of attention begins at once.
#ifndef MESHFILL_SERVER_CLI_GPU_PLAN_H_
#define MESHFILL_SERVER_CLI_GPU_PLAN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan_weights.h"
#include "engine/plan/planner.h"
#include "server/cli/scenario.h"

namespace meshfill {

struct GpuPlan {
  PlanChoice choice;
  PoolSpeed speed;                     // the speed that it was planned with
  std::vector<WeightModeBytes> modes;  // bytes on one GPU, and on a node's host; modes that fit have seconds
  std::vector<std::string> not_yet;    // what of it Meshfill does not do on GPUs so far; empty: nothing
};

// The fastest of what fits the GPUs and their hosts: weights resident, sharded or streamed, and the prompt
// whole or in pieces of a multiple of `granule_tokens`. Of the request all is read but its memory, weights
// and topology. FAILED_PRECONDITION: nothing fits; the message has what each mode would need. Other errors:
// MakePlan's.
absl::StatusOr<GpuPlan> PlanOnGpus(const ModelShape& model, const GpuCluster& gpus, PlanRequest request,
                                   int64_t granule_tokens);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_GPU_PLAN_H_
