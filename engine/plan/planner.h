// Chooses the plan (Mesh-Attention Figure 6): each factorisation is scheduled and timed, the best taken.
// Beyond the paper, a shape may have head groups (n = h·a·b), and is planned in every way that the caller
// leaves open:
//
//     layout       striped, zigzag, contiguous: the ranks' chunks are as even as it deals them
//     stripes      for a model with windows longer ones, too, of which there are 8 rounds at least
//     wire dtype   of partial outputs: bf16 halves their bytes, and costs their accuracy (docs/tuning.md)
//     placement    every box of ranks that fills a node: the ring that moves more stays inside it
//     schedule     Algorithm 2's, that of least time (optimal_schedule.h), or one with messages along all
//                  rings at once (multi_ring_schedule.h)
//     KV rings     one, or with such a schedule a double ring whose inner rings are inside nodes, or are even
//                  parts of them (mesh.h)
//     exchange     of head groups, at once or in slices beside the work on tokens
//
// The fastest of them stands for the shape: the first to come in these lists, and row-first ranks, unless
// another gains 0.2 %, or with another layout or wire dtype 1 %. For a model whose layers all have a short
// window, contiguous chunks come first, which send least, unless K and V are kept. Of two schedules that tie,
// the one that needs less memory. Slices, which need more, have to gain 1 % as well.
#ifndef MESHFILL_ENGINE_PLAN_PLANNER_H_
#define MESHFILL_ENGINE_PLAN_PLANNER_H_

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_request.h"

namespace meshfill {

// Candidates are the shapes h · a × b that the model's heads allow and that fit the memory budget (of those,
// the ones that the caller's tile and head groups leave): the plan's, then the others by predicted seconds,
// then by bytes sent, then by peak memory. The plan is the fastest, unless that gains less than 1 % on one
// whose layout comes before its own; its schedule has passed CheckSchedule. INVALID_ARGUMENT: no tokens,
// head groups that the heads or the ranks do not allow (the message has those that they do), a tile that does
// not multiply to the ranks, bad options, a topology with fewer seats than ranks. FAILED_PRECONDITION: no
// shape fits the memory budget (the message has the budget, and the smallest that would do with its shape).
absl::StatusOr<PlanChoice> MakePlan(const ModelShape& model, const PoolSpeed& speed,
                                    const PlanRequest& request);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLANNER_H_
