// The memory of a prefill's activations at its peak, over all ranks together: what the executor then has
// (executor_test), so that a plan which does not fit is none.
#ifndef MESHFILL_ENGINE_PLAN_PEAK_BYTES_H_
#define MESHFILL_ENGINE_PLAN_PEAK_BYTES_H_

#include <cstdint>

#include "engine/model/model_shape.h"
#include "engine/plan/plan_shape.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

// The residual stream, the RoPE tables and the slice buffers of each rank (rank_runner.h), which live
// throughout, a layer's chunks and partial outputs, and the K and V that are kept: those of all layers where
// they stay, those of one layer until the next where they leave for the host.
int64_t PeakBytes(const ModelShape& model, int64_t most_slice_tokens, const PlanShape& shape,
                  const Schedule& schedule);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PEAK_BYTES_H_
