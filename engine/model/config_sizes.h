// Bounds of what a config's sizes make together. Each of them may be within its own bound, and their product
// beyond what 64 bits hold.
#ifndef MESHFILL_ENGINE_MODEL_CONFIG_SIZES_H_
#define MESHFILL_ENGINE_MODEL_CONFIG_SIZES_H_

#include <string>

#include "absl/status/status.h"
#include "engine/model/model_shape.h"

namespace meshfill {

// Far above any model that exists. Below 2^63 even times the ranks of the largest plan.
inline constexpr double kMaxWeightBytes = double{1LL << 50};  // all weights in f32
// Of the longest prompt in f32: K and V of all layers, and what all its tokens of one layer are computed in.
inline constexpr double kMaxPromptBytes = double{1LL << 60};

// INVALID_ARGUMENT names `path`, and the sizes that are too large together.
absl::Status CheckSizes(const ModelShape& shape, const std::string& path);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_CONFIG_SIZES_H_
