// The tensors of a model's folder: found and checked, and packed on a device a layer at a time.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_
#define MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/layer.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors_folder.h"
#include "kernels/device.h"

namespace meshfill {

// How a device comes by the elements. Null: it takes them from the mapped file. Else they are read from the
// file, panel by panel, which a device in the host's memory alone can; it is called before each read, and its
// error ends the packing.
using BeforeRead = std::function<absl::Status()>;

// Immutable; any thread may pack.
class ModelTensors {
 public:
  // A tensor that has been found in the folder, of the expected shape.
  struct Weight {
    const SafetensorsFolder::Entry* entry = nullptr;
    DType dtype = DType::kF32;
  };
  // A linear layer's matrix and, where the model has one, its bias (else entry is null). A vector is a linear
  // layer without a bias.
  struct Linear {
    Weight matrix;
    Weight bias;
  };

  // Reads config.json and finds all that it asks for. Errors: those of Model::Load.
  static absl::StatusOr<std::unique_ptr<const ModelTensors>> Find(const std::string& folder);

  const std::string& path() const { return folder_.path(); }
  const ModelConfig& config() const { return config_; }
  bool all_f32() const { return all_f32_; }  // of all matrices
  const Weight& embedding() const { return embedding_; }

  absl::StatusOr<LayerWeights> PackLayer(Device& device, int layer, const BeforeRead& before_read) const;
  // Rows [first, first + rows) of the LM head's matrix.
  absl::StatusOr<std::unique_ptr<PackedWeight>> PackHead(Device& device, int64_t first, int64_t rows,
                                                         const BeforeRead& before_read) const;
  absl::StatusOr<PlacedVector> PlaceFinalNorm(Device& device) const;

 private:
  // By part, by expert, the linear layers that are stacked.
  using FoundLayer = std::map<LayerPart, std::vector<std::vector<Linear>>>;

  explicit ModelTensors(SafetensorsFolder folder) : folder_(std::move(folder)) {}

  const SafetensorsFolder folder_;
  ModelConfig config_;
  std::vector<FoundLayer> layers_;
  Weight embedding_, final_norm_, lm_head_;
  bool all_f32_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_
