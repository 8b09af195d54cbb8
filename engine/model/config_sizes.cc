#include "engine/model/config_sizes.h"

#include "absl/strings/str_cat.h"
#include "engine/model/layer_shape.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr double kF32Bytes = sizeof(float);

// In f32, as a double: an int64_t overflows before it can be compared. A single layer's elements do not.
double AllWeightBytes(const ModelShape& shape) {
  double elements = 2 * static_cast<double>(shape.vocab * shape.hidden);
  shape.ForEachKind([&](const LayerForm& form, int layers) {
    elements += layers * static_cast<double>(LayerMatrixElements(LayerShapeOf(shape, form)));
  });
  return kF32Bytes * elements;
}

double PromptKvBytes(const ModelShape& shape) {
  return kF32Bytes * shape.layers * static_cast<double>(shape.kv_elements(shape.context_tokens));
}

double LayerPromptBytes(const ModelShape& shape) {
  const SliceWidths widths = SliceWidthsOf(shape);
  return kF32Bytes * static_cast<double>(widths.normed + widths.wide + widths.narrow) *
         static_cast<double>(shape.context_tokens);
}

absl::Status CheckBytes(const std::string& path, const std::string& sizes, const char* what, double bytes,
                        double most) {
  if (bytes <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", sizes, " are too large together: ", what,
                                                 " would take ", bytes, " bytes in f32, and at most ", most,
                                                 " are allowed; correct the sizes"));
}

}  // namespace

absl::Status CheckSizes(const ModelShape& shape, const std::string& path) {
  const std::string layers = absl::StrCat("num_hidden_layers ", shape.layers);
  const std::string context = absl::StrCat("max_position_embeddings ", shape.context_tokens);
  const std::string widths =
      absl::StrCat("hidden_size ", shape.hidden, ", intermediate_size ", shape.intermediate);
  const auto& [count, used, width, shared_width] = shape.experts;
  const std::string experts = count == 0 ? "" : absl::StrCat(" experts of width ", width);
  RETURN_IF_ERROR(CheckBytes(path,
                             absl::StrCat(layers, ", vocab_size ", shape.vocab, ", ", widths,
                                          count == 0 ? "" : absl::StrCat(", ", count), experts),
                             "the weights", AllWeightBytes(shape), kMaxWeightBytes));
  RETURN_IF_ERROR(CheckBytes(path,
                             absl::StrCat(layers, ", ", context, ", num_key_value_heads ", shape.kv_heads,
                                          ", head_dim ", shape.head_dim),
                             "K and V of a prompt", PromptKvBytes(shape), kMaxPromptBytes));
  return CheckBytes(
      path, absl::StrCat(context, ", ", widths, count == 0 ? "" : absl::StrCat(", ", used, " used"), experts),
      "a layer of a prompt", LayerPromptBytes(shape), kMaxPromptBytes);
}

}  // namespace meshfill
