// A tensor that has been found in a model's folder, and how its elements are read.
#ifndef MESHFILL_ENGINE_MODEL_FOUND_WEIGHT_H_
#define MESHFILL_ENGINE_MODEL_FOUND_WEIGHT_H_

#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/layer_shape.h"
#include "engine/model/safetensors_folder.h"
#include "engine/model/weight_feed.h"
#include "kernels/dtype.h"

namespace meshfill {

// A tensor of the folder, of the expected shape.
struct FoundWeight {
  const SafetensorsFolder::Entry* entry = nullptr;  // its shape: [out_features, in_features]
  DType dtype = DType::kF32;
  bool transposed = false;  // its elements lie as [in_features, out_features]
};

// A linear layer's matrix and, where the model has them, its bias and the scales of FP8 and MXFP4 (else entry
// is null). A vector is a linear layer without a bias.
struct FoundLinear {
  FoundWeight matrix;
  FoundWeight bias;
  FoundWeight scales;
};

// The linear layers that are stacked, by part and by expert.
using FoundLayer = std::map<LayerPart, std::vector<std::vector<FoundLinear>>>;

// The BeforeRead of a load that nobody stops.
inline absl::StatusOr<PageCache> FillPageCache() { return PageCache::kFill; }

// The tensor's elements as its file has them.
absl::Status CopyElements(const FoundWeight& weight, const BeforeRead& before_read, void* to);

// A vector of the model (norm weight, bias) in f32; empty where the model has none.
absl::StatusOr<std::vector<float>> ToFloats(const FoundWeight& weight, const BeforeRead& before_read);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_FOUND_WEIGHT_H_
