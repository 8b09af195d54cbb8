// Predicts what a schedule costs (Mesh-Attention §3.5, Figure 6): seconds here, bytes sent in
// engine/plan/comm_bytes.h, memory in engine/plan/peak_bytes.h.
//
// Ranks are taken to run in lockstep and chunks to be as long as the longest. A step then takes the longer of
// its communication and its blocks, and what the communication takes beyond its blocks is comm wait. Of a
// communication that outlasts its step the blocks of all its steps count, and it shares links with those
// along other rings (messages_under_way.h). Where blocks or messages of a layer differ (layer_reach.h), each
// counts as that of the rank that has most.
#ifndef MESHFILL_ENGINE_PLAN_COST_MODEL_H_
#define MESHFILL_ENGINE_PLAN_COST_MODEL_H_

#include <cstdint>

#include "engine/model/model_shape.h"
#include "engine/plan/attention_seconds.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_shape.h"
#include "engine/plan/rank_speed.h"
#include "engine/schedule/multi_ring_schedule.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

// The least numbers of blocks that hide the transfer of one Q, KV and O chunk: what Algorithm 2 asks for. For
// the average layer, where some have a sliding window; at most a·b, beyond which they mean the same.
OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

// The most blocks that are over when such a transfer is: a step of them makes no transfer longer. 1 where it
// takes half a block or more; 0 where it takes less, so that a long transfer behind it has the blocks beside
// it.
OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

// What a schedule with several messages at once is made by: a block of the average layer, and the longest
// messages.
RingSeconds RingSecondsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

AttentionSeconds AttentionSecondsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                                    int64_t window);

// The exchange_tokens with which the shape is predicted to be fastest: slices hide more, and each takes its
// start. 0 where one exchange is; of those that tie, the fewest slices.
int64_t BestExchangeTokens(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape);

// Predicts the whole prefill with weights that are there (plan_weights.h). `schedule` must be for
// `shape.tile`.
Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule);

// Its parts, for whoever compares many: all but bytes, and the memory. The schedule does not change the bytes
// sent.
Prediction PredictTime(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                       const Schedule& schedule);
void PredictMemory(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule, Prediction& predicted);

// What a pass takes of `parts.products` however few tokens it has: a slice of each layer, and the LM head,
// whose weights are read once for all rows.
double PassSeconds(const ModelShape& model, const PoolSpeed& speed);

// No schedule of the shape is predicted to take less: its transfers go one by one, or with `many_rings` along
// all rings at once, its blocks beside them.
double LeastSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                    bool many_rings = false);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_COST_MODEL_H_
