// The timeline that the cost model foresees for a plan's attention: what Predict adds up, laid out in time.
#ifndef MESHFILL_ENGINE_PLAN_PREDICTED_TIMELINE_H_
#define MESHFILL_ENGINE_PLAN_PREDICTED_TIMELINE_H_

#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "engine/plan/plan.h"
#include "engine/schedule/timeline.h"

namespace meshfill {

// The attention of one layer, one without a sliding window if there is one. All ranks are alike: the model
// takes them to run in lockstep.
Timeline PredictLayer(const ModelShape& model, const PoolSpeed& speed, const Plan& plan);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PREDICTED_TIMELINE_H_
