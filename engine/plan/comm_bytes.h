// The bytes that ranks send, exactly; for equal chunks and one mesh, (a−1) Q + (b−1) KV + (a−1) O
// chunks in a layer, and engine/run/head_exchange.h for the all-to-alls of head groups; for ragged chunks and
// replicated KV heads too, and without what nobody sees (layer_reach.h).
#ifndef MESHFILL_ENGINE_PLAN_COMM_BYTES_H_
#define MESHFILL_ENGINE_PLAN_COMM_BYTES_H_

#include <cstdint>

#include "engine/mesh/layout.h"
#include "engine/mesh/mesh.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_shape.h"

namespace meshfill {

// Bytes that `rank` sends in one layer; `window` is the layer's, 0: none.
CommBytes LayerCommBytes(const ModelShape& model, const PlanShape& shape, int64_t window, int rank);

// Bytes that `rank` sends over all layers.
CommBytes RankCommBytes(const ModelShape& model, const PlanShape& shape, int rank);

// Bytes sent over all layers by the busiest sender. The schedule does not change them.
CommBytes PrefillCommBytes(const ModelShape& model, const PlanShape& shape);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_COMM_BYTES_H_
