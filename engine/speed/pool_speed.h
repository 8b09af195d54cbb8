// Measures what the planner predicts from: this pool's compute, at load (Mesh-Attention §3.5 profiles c_Q,
// c_KV, c_O). Each part of a prefill is run as a rank runs it, at two sizes or more: a line through them says
// what a part costs by itself and by its work.
#ifndef MESHFILL_ENGINE_SPEED_POOL_SPEED_H_
#define MESHFILL_ENGINE_SPEED_POOL_SPEED_H_

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "kernels/stream.h"

namespace meshfill {

// `streams` are as many as run at once, each as a rank of the pool has it; its `ranks` ranks share them
// equally where they are more. Takes some tenths of a second, on GPUs most of a second
// (Grain::settle_seconds); wide models are measured narrower. The links are those of ranks in one process: a
// chunk is handed over by reference. Errors are the device's.
absl::StatusOr<PoolSpeed> MeasurePoolSpeed(const ModelShape& model, std::span<Stream* const> streams,
                                           int ranks);

// The speed of a rank that has `share` of a stream's while all ranks run, and all of it while the others
// wait.
PoolSpeed ShareOf(double share, PoolSpeed speed);

// Runs each of the operations that it measures once.
absl::Status RunEachOperation(const ModelShape& model, Stream& stream);

// Measures a pool of `ranks` ranks on one device, of which it makes `streams` streams.
absl::StatusOr<PoolSpeed> MeasurePoolSpeed(const ModelShape& model, Device& device, int streams, int ranks);

// Seconds = fixed + per_unit · units.
struct CostLine {
  double fixed = 0;
  double per_unit = 0;
};
struct CostSample {
  double units = 0;
  double seconds = 0;
};

// The line with the least squares of relative errors, neither part below 0. At least one sample; all
// positive.
CostLine FitCostLine(std::span<const CostSample> samples);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SPEED_POOL_SPEED_H_
