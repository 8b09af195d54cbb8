// What a rank's pass over several prompts is predicted to take, in parts: what SpeedCorrection learns from,
// where prompts share passes and none is measured by itself.
#ifndef MESHFILL_ENGINE_PLAN_PASS_PARTS_H_
#define MESHFILL_ENGINE_PLAN_PASS_PARTS_H_

#include <span>

#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/plan/rank_speed.h"

namespace meshfill {

// `prompts`: parts of each one's plan for this rank, made with `speed` and weights that stay loaded. None: 0.
PartSeconds PassParts(const ModelShape& model, const PoolSpeed& speed, std::span<const PartSeconds> prompts);

// Whether a pass tells of the speed of its ranks, each predicted to take that: not where ranks share cores,
// and some ran faster since others had less to do.
bool TellsOfSpeed(std::span<const PartSeconds> ranks, bool share_cores);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PASS_PARTS_H_
