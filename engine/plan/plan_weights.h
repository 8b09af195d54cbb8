// What weights take of memory and of time, as plans count them.
#ifndef MESHFILL_ENGINE_PLAN_PLAN_WEIGHTS_H_
#define MESHFILL_ENGINE_PLAN_PLAN_WEIGHTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "engine/model/layer_shape.h"

namespace meshfill {

struct Prediction;

// Bytes are of all ranks together; the ranks of a process that share weights count them once.
struct PlanWeights {
  WeightMode mode = WeightMode::kResident;
  int64_t loaded_bytes = 0;  // in memory whether something runs or not
  int64_t run_bytes = 0;     // of each run beside them: two layers that stream past
  // Where they stream:
  double layer_seconds = 0;       // from the call for a layer until it is there, when nothing else runs
  double layer_busy_seconds = 0;  // of these, what the ranks' cores would have computed in
  double head_seconds = 0;        // the same as layer_seconds for the LM head

  PlanWeights Share(int64_t ranks, int64_t of) const;  // of `ranks` ranks, where these are of `of`
  bool operator==(const PlanWeights&) const = default;
};

// What a process would need of memory for weights held so, one prefill's layers included.
struct WeightModeBytes {
  WeightMode mode;
  int64_t bytes;
  bool fits;  // in what is free now
};

// The same for every process of a pool: what the one that needs most, and longest, does.
PlanWeights MostOf(const PlanWeights& left, const PlanWeights& right);

// INVALID_ARGUMENT names the number that is negative or not finite.
absl::Status CheckPlanWeights(const PlanWeights& weights);

// Adds them to the prediction of a run's compute, communication and activations. A layer comes while the one
// before it is computed: the first is waited for, a later one as far as its coming takes longer than that
// layer. It takes cores from it, too.
void CountWeights(const PlanWeights& weights, int layers, Prediction& predicted);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLAN_WEIGHTS_H_
