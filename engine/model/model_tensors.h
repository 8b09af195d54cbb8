// The tensors of a model's folder: found and checked, and packed on a device a layer at a time.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_
#define MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/found_weight.h"
#include "engine/model/layer.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors_folder.h"
#include "engine/model/weight_feed.h"
#include "engine/model/weight_image.h"
#include "kernels/device.h"

namespace meshfill {

// Elements are read from the files, some rows at a time, and never taken from a mapping: a file that shrinks
// is an error, and no signal. `before_read` says how, and is not null.
//
// Immutable; any thread may pack.
class ModelTensors {
 public:
  // Reads config.json and finds all that it asks for. Errors: those of Model::Load. With `check_values` false
  // only headers are read: scales may be no numbers, and a tied head may differ from the embedding.
  static absl::StatusOr<std::unique_ptr<const ModelTensors>> Find(const std::string& folder,
                                                                  bool check_values = true);

  const SafetensorsFolder& folder() const { return folder_; }
  const std::string& path() const { return folder_.path(); }
  const ModelConfig& config() const { return config_; }
  bool all_f32() const { return all_f32_; }  // all matrices are f32 in the folder
  const FoundWeight& embedding() const { return embedding_; }

  absl::StatusOr<LayerWeights> PackLayer(Device& device, int layer, const BeforeRead& before_read) const;
  // Rows [first, first + rows) of the LM head's matrix.
  absl::StatusOr<std::unique_ptr<PackedWeight>> PackHead(Device& device, int64_t first, int64_t rows,
                                                         const BeforeRead& before_read) const;
  absl::StatusOr<PlacedVector> PlaceFinalNorm(Device& device) const;

  // The same in bytes, for weights that processes or devices share. Those in FP8 and MXFP4 stay so.
  absl::StatusOr<WeightImage> LayerImage(Device& device, int layer) const;
  absl::StatusOr<WeightImage> HeadImage(Device& device, int64_t rows) const;
  // Bytes [begin, end) of the image. Panels that they cut are packed whole for it.
  absl::StatusOr<BufferRef> PackLayerBytes(Device& device, int layer, const WeightImage& image, int64_t begin,
                                           int64_t end, const BeforeRead& before_read) const;
  absl::StatusOr<BufferRef> PackHeadBytes(Device& device, int64_t first, const WeightImage& image,
                                          int64_t begin, int64_t end, const BeforeRead& before_read) const;
  // The layer whose matrices are `bytes`, all those of the image.
  absl::StatusOr<LayerWeights> LayerOf(Device& device, int layer, const WeightImage& image,
                                       const BufferRef& bytes, const BeforeRead& before_read) const;

 private:
  // A part's matrix, of one expert where it is theirs.
  using Packer = std::function<absl::StatusOr<std::unique_ptr<PackedWeight>>(
      LayerPart part, int copy, const std::vector<FoundLinear>& linears)>;
  absl::StatusOr<LayerWeights> MakeLayer(Device& device, int layer, const BeforeRead& before_read,
                                         const Packer& pack) const;

  SafetensorsFolder::Entry HeadRows(int64_t first, int64_t rows) const;  // rows of the LM head

  explicit ModelTensors(SafetensorsFolder folder) : folder_(std::move(folder)) {}

  const SafetensorsFolder folder_;
  ModelConfig config_;
  std::deque<SafetensorsFolder::Entry> parts_;  // slices of tensors that stack experts
  std::vector<FoundLayer> layers_;
  FoundWeight embedding_, final_norm_, lm_head_;
  bool all_f32_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_
