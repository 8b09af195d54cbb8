// Finds a model's tensors in its folder one by one, checks their shapes, and remembers what nobody asked for.
#ifndef MESHFILL_ENGINE_MODEL_TENSOR_FINDER_H_
#define MESHFILL_ENGINE_MODEL_TENSOR_FINDER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/found_weight.h"
#include "engine/model/language_model.h"
#include "engine/model/layer_shape.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors_folder.h"

namespace meshfill {

// The first error is kept, so that a caller asks once (Finish).
class TensorFinder {
 public:
  // `parts` gets the entries of tensors that stack experts. All of them outlive the finder. `check_values`:
  // scales, sinks and a tied head are read, too.
  TensorFinder(const SafetensorsFolder& folder, const ModelConfig& config,
               std::deque<SafetensorsFolder::Entry>& parts, bool check_values);

  // `language_name`: as a folder of a language model alone has it.
  FoundWeight Find(const std::string& language_name, const std::vector<int64_t>& shape,
                   bool may_be_fp8 = false);

  // All tensors of a layer. Those of one product are in FP8 all, or none is.
  FoundLayer FindLayer(int layer);

  // lm_head.weight, or the embedding where the two are tied. INVALID_ARGUMENT: a copy in the file differs.
  absl::StatusOr<FoundWeight> FindLmHead(const FoundWeight& embedding);

  // Tensors whose names begin so may be there, and are of no use.
  void Ignore(std::string prefix) { ignored_.push_back(std::move(prefix)); }

  // INVALID_ARGUMENT, naming file and tensor: it is missing, of another shape or dtype, or nobody asked for
  // it, so that the config and the weights are not of one model.
  absl::Status Finish();

  bool all_f32() const { return all_f32_; }  // all matrices found so far are f32

 private:
  const SafetensorsFolder::Entry* FindEntry(const std::string& language_name) const;
  // `name` is the name in the folder. Null: the tensor is missing.
  const SafetensorsFolder::Entry* FindShaped(const std::string& name, const std::vector<int64_t>& shape);
  FoundLinear Find(const LayerTensor& tensor, int layer, int copy);
  // All copies of a tensor that stacks them.
  std::vector<FoundLinear> FindStacked(const LayerTensor& tensor, int layer);
  // The same in MXFP4: two elements in a byte, and a scale for each block of them in another tensor.
  std::vector<FoundLinear> FindFp4(const LayerTensor& tensor, int layer);
  FoundWeight FindBytes(const std::string& name, const std::vector<int64_t>& shape);
  FoundWeight FindScales(const LayerTensor& tensor, int layer, int copy);
  // Part `index` of a tensor along its first extent, of this shape.
  FoundWeight StackedPart(const FoundWeight& whole, int64_t index, std::vector<int64_t> shape);

  void CheckProduct(const std::vector<FoundLinear>& linears);
  // Checks that no exponent says NaN, nor a scale times which an element overflows f32.
  void CheckExponents(const FoundWeight& scales, const std::string& name);
  // `what` is one of the vector's values: "scale".
  void CheckFinite(const FoundWeight& vector, const std::string& name, const char* what);
  void Fail(const std::string& path, const std::string& name, const std::string& what);

  const SafetensorsFolder& folder_;
  const ModelConfig& config_;
  std::deque<SafetensorsFolder::Entry>& parts_;
  const bool check_values_;
  const LanguageTensorNames names_;
  std::set<std::string, std::less<>> found_;
  std::vector<std::string> ignored_;
  bool all_f32_ = true;
  absl::Status status_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_TENSOR_FINDER_H_
