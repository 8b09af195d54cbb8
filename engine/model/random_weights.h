// The weights of a model of random values: which tensors there are, and what is in them. A tensor goes into a
// file a slice at a time, and never is in memory whole.
#ifndef MESHFILL_ENGINE_MODEL_RANDOM_WEIGHTS_H_
#define MESHFILL_ENGINE_MODEL_RANDOM_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors_writer.h"

namespace meshfill {

struct RandomTensor {
  TensorSpec spec;
  double mean;
  double deviation;   // standard deviation of the values, which are close to normal
  bool bits = false;  // the elements are random bytes, all values alike
};

// All tensors that a loader of the config asks for, in the layers' order, and behind all others those of the
// layers that a prefill leaves out (ModelConfig::unused_layers). Names are the published ones. What the
// config has in FP8 and MXFP4 is so, the rest is in config.shape.dtype.
std::vector<RandomTensor> RandomWeightsOf(const ModelConfig& config);

// Appends the values of tensor `index` of the model that `seed` makes, rounded to the tensor's type: the same
// bytes on every machine. Errors: the writer's. INTERNAL: the type is none of F32, BF16, F16, F8_E4M3 and U8.
absl::Status AppendRandomTensor(const RandomTensor& tensor, uint64_t seed, size_t index,
                                SafetensorsWriter& writer);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_RANDOM_WEIGHTS_H_
