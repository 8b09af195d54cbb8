// Which model a process has: what leader and workers compare before they compute together.
#ifndef MESHFILL_SERVER_POOL_MODEL_ID_H_
#define MESHFILL_SERVER_POOL_MODEL_ID_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "kernels/dtype.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

struct IdentifiedModel {
  v1::ModelId id;  // config_hash: of config.json's bytes. weights_hash: of every tensor's name, dtype, shape
                   // and of samples of its bytes; 0 where the folder has no weights
  ModelShape shape;  // with the compute dtype: `dtype`, else f32 for f32 weights, else bf16
};

// NOT_FOUND: no such folder or config.json. INVALID_ARGUMENT: broken files.
absl::StatusOr<IdentifiedModel> IdentifyModel(const std::string& folder, std::optional<DType> dtype);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_MODEL_ID_H_
