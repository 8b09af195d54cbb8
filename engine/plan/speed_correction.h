// Corrects predicted seconds by what prefills took: one factor for all plans, so that it never changes which
// plan is best. Safe on any thread.
#ifndef MESHFILL_ENGINE_PLAN_SPEED_CORRECTION_H_
#define MESHFILL_ENGINE_PLAN_SPEED_CORRECTION_H_

#include "absl/base/thread_annotations.h"
#include "engine/plan/plan.h"
#include "kernels/mutex.h"

namespace meshfill {

class SpeedCorrection {
 public:
  // A prefill took `measured` seconds under a plan whose prediction, as corrected then, was `predicted`. The
  // factor moves by kStep of their ratio's logarithm, which is taken as at most kMostRatio either way; it
  // stays in [1/kMostFactor, kMostFactor]. Seconds that are not positive are ignored.
  void Observe(double predicted, double measured);

  double factor() const;

  // Scales the seconds of the plan and of all candidates. Bytes and order stay.
  void Apply(PlanChoice& choice) const;

  static constexpr double kStep = 0.2;
  static constexpr double kMostRatio = 2;
  static constexpr double kMostFactor = 8;

 private:
  mutable Mutex mu_;
  double factor_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_SPEED_CORRECTION_H_
