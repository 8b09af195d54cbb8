#include "engine/plan/speed_correction.h"

#include <algorithm>
#include <cmath>

#include "kernels/mutex.h"

namespace meshfill {

void SpeedCorrection::Observe(double predicted, double measured) {
  if (!(predicted > 0 && measured > 0)) return;
  const double ratio = std::clamp(measured / predicted, 1 / kMostRatio, kMostRatio);
  const MutexLock lock(mu_);
  factor_ = std::clamp(factor_ * std::pow(ratio, kStep), 1 / kMostFactor, kMostFactor);
}

double SpeedCorrection::factor() const {
  const MutexLock lock(mu_);
  return factor_;
}

void SpeedCorrection::Apply(PlanChoice& choice) const {
  const auto scale = [factor = factor()](Prediction& predicted) {
    predicted.compute_seconds *= factor;
    predicted.comm_wait_seconds *= factor;
    predicted.weight_seconds *= factor;
    predicted.seconds = predicted.compute_seconds + predicted.comm_wait_seconds + predicted.weight_seconds;
  };
  scale(choice.plan.predicted);
  for (Plan& piece : choice.pieces) scale(piece.predicted);
  for (PlanCandidate& candidate : choice.candidates) scale(candidate.predicted);
}

}  // namespace meshfill
