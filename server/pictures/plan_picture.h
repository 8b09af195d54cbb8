// Draws a whole plan as one SVG: who computes what, in which steps, and how long each rank is predicted to
// take.
#ifndef MESHFILL_SERVER_PICTURES_PLAN_PICTURE_H_
#define MESHFILL_SERVER_PICTURES_PLAN_PICTURE_H_

#include <string>

#include "engine/plan/plan.h"
#include "engine/schedule/timeline.h"

namespace meshfill {

// `layer`: the predicted attention of one layer (engine/plan/predicted_timeline.h).
std::string PlanSvg(const Plan& plan, const Timeline& layer);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_PLAN_PICTURE_H_
