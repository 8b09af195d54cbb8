// Which model a process has: what leader and workers compare before they compute together.
#ifndef MESHFILL_SERVER_POOL_MODEL_ID_H_
#define MESHFILL_SERVER_POOL_MODEL_ID_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/model/safetensors_folder.h"
#include "kernels/dtype.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

struct IdentifiedModel {
  v1::ModelId id;  // config_hash: of config.json's bytes. weights_hash: of every tensor's name, dtype, shape
                   // and of samples of its bytes; 0 where the folder has no weights
  ModelShape shape;  // with the compute dtype: `dtype`, else f32 for f32 weights, else bf16
};

// NOT_FOUND: no such folder or config.json. INVALID_ARGUMENT: broken files. DATA_LOSS: a file shrinks.
absl::StatusOr<IdentifiedModel> IdentifyModel(const std::string& folder, std::optional<DType> dtype);

// Bytes of one tensor.
struct WeightSample {
  const SafetensorsFolder::Entry* entry;
  std::span<const std::byte> bytes;
};

// The bytes that WeightsHash reads: all of a folder with up to 4 MiB of tensors, else 4 MiB, spread evenly.
// Of a large folder the small tensors have none.
std::vector<WeightSample> WeightSamples(const SafetensorsFolder& folder);
// Never 0. DATA_LOSS: a file has lost its bytes since it was opened.
absl::StatusOr<uint64_t> WeightsHash(const SafetensorsFolder& folder);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_MODEL_ID_H_
