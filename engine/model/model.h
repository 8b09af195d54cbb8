// A loaded model: its config and its weights, packed once on a device and shared by the ranks that compute
// on it.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_H_
#define MESHFILL_ENGINE_MODEL_MODEL_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/layer.h"
#include "engine/model/model_config.h"
#include "kernels/device.h"

namespace meshfill {

class EmbeddingTable;  // keeps the table's file mapped where operations read it there

class Model {
 public:
  // Reads config.json, then decides the compute dtype (`dtype`, or f32 for f32 weights and bf16 otherwise)
  // and asks `device_for` for the device of it that the weights are packed on, when all else has been
  // checked; an error of it is this one's. NOT_FOUND: no such folder or file. INVALID_ARGUMENT: anything in
  // it is broken or not implemented; the message names the file, the tensor or key, and what to do.
  static absl::StatusOr<std::unique_ptr<Model>> Load(
      const std::string& folder, std::optional<DType> dtype,
      const std::function<absl::StatusOr<Device*>(const ModelShape&)>& device_for);
  ~Model();

  const ModelConfig& config() const { return config_; }
  const ModelShape& shape() const { return config_.shape; }  // with the compute dtype
  const void* embedding() const;  // [vocab, hidden], embedding_dtype, where operations read it
  DType embedding_dtype() const;
  const std::vector<LayerWeights>& layers() const { return layers_; }
  const PlacedVector& final_norm() const { return final_norm_; }  // [hidden]
  const PackedWeight& lm_head() const { return *lm_head_; }       // [vocab, hidden]

 private:
  Model();
  ModelConfig config_;
  std::unique_ptr<EmbeddingTable> embedding_;
  std::vector<LayerWeights> layers_;
  PlacedVector final_norm_;
  std::unique_ptr<PackedWeight> lm_head_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_H_
