// Measures what the planner predicts from: this pool's compute, at load (Mesh-Attention §3.5 profiles c_Q, c_KV, c_O).
#ifndef MESHFILL_ENGINE_POOL_SPEED_H_
#define MESHFILL_ENGINE_POOL_SPEED_H_

#include "absl/status/statusor.h"
#include "engine/model_shape.h"
#include "engine/planner.h"
#include "kernels/backend.h"

namespace meshfill {

// `backend` uses all threads of the pool, whose `ranks` ranks then share its speed equally. Takes some tens of
// milliseconds. The links are those of ranks in one process: a chunk is handed over by reference.
absl::StatusOr<PoolSpeed> MeasurePoolSpeed(const ModelShape& model, Backend& backend, int ranks);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_POOL_SPEED_H_
