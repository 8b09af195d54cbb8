// The tensors of a model's folder: found and checked, and packed on a device a layer at a time.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_
#define MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_

#include <cstdint>
#include <deque>
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
#include "engine/model/weight_feed.h"
#include "kernels/device.h"

namespace meshfill {

// The matrices of a part of the weights as bytes: packed, one after the other, panel by panel.
//
//     layer   | qkv 0 | qkv 1 | … | o 0 | o 1 | … | gate_up 0 | …
//     shares  |    0      |     1     |     2     |     3      |     cut where panels begin
//
// Processes that share weights keep one share each. All bytes together are what PackWeight would have made,
// so that products have the same bits.
struct WeightImage {
  struct Matrix {
    LayerPart part;  // of a layer
    int copy = 0;    // the expert's
    int64_t out_features = 0;
    int64_t in_features = 0;
    ElementKind kind = {};
    PackedForm form;
    int64_t begin = 0;  // byte of the image
  };

  // Puts it behind the others, where a cache line begins.
  void Add(Matrix matrix);

  // Where share `index` of `of` begins; `index` may be `of`. Shares differ by a panel at most.
  int64_t Cut(int index, int of) const;

  std::vector<Matrix> matrices;
  int64_t bytes = 0;
};

// `before_read` says how a device comes by the elements. Null: it takes them from the mapped file. Else they
// are read from the file, panel by panel, which a device in the host's memory alone can.
//
// Immutable; any thread may pack.
class ModelTensors {
 public:
  // A tensor that has been found in the folder, of the expected shape.
  struct Weight {
    const SafetensorsFolder::Entry* entry = nullptr;  // its shape: [out_features, in_features]
    DType dtype = DType::kF32;
    bool transposed = false;  // its elements lie as [in_features, out_features]
  };
  // A linear layer's matrix and, where the model has them, its bias and the scales of FP8 (else entry is
  // null). A vector is a linear layer without a bias.
  struct Linear {
    Weight matrix;
    Weight bias;
    Weight scales;
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

  // The same in bytes, for weights that processes share. Those in FP8 and MXFP4 stay so. `before_read` is not
  // null.
  absl::StatusOr<WeightImage> LayerImage(Device& device, int layer) const;
  absl::StatusOr<WeightImage> HeadImage(Device& device, int64_t rows) const;
  // Bytes [begin, end) of the image, both where panels begin.
  absl::StatusOr<BufferRef> PackLayerBytes(Device& device, int layer, const WeightImage& image, int64_t begin,
                                           int64_t end, const BeforeRead& before_read) const;
  absl::StatusOr<BufferRef> PackHeadBytes(Device& device, int64_t first, const WeightImage& image,
                                          int64_t begin, int64_t end, const BeforeRead& before_read) const;
  // The layer whose matrices are `bytes`, all those of the image.
  absl::StatusOr<LayerWeights> LayerOf(Device& device, int layer, const WeightImage& image,
                                       const BufferRef& bytes, const BeforeRead& before_read) const;

 private:
  // By part, by expert, the linear layers that are stacked.
  using FoundLayer = std::map<LayerPart, std::vector<std::vector<Linear>>>;

  // A part's matrix, of one expert where it is theirs.
  using Packer = std::function<absl::StatusOr<std::unique_ptr<PackedWeight>>(
      LayerPart part, int copy, const std::vector<Linear>& linears)>;
  absl::StatusOr<LayerWeights> MakeLayer(Device& device, int layer, const BeforeRead& before_read,
                                         const Packer& pack) const;

  SafetensorsFolder::Entry HeadRows(int64_t first, int64_t rows) const;  // of the LM head's matrix

  explicit ModelTensors(SafetensorsFolder folder) : folder_(std::move(folder)) {}

  const SafetensorsFolder folder_;
  ModelConfig config_;
  std::deque<SafetensorsFolder::Entry> parts_;  // of tensors that stack experts
  std::vector<FoundLayer> layers_;
  Weight embedding_, final_norm_, lm_head_;
  bool all_f32_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_TENSORS_H_
