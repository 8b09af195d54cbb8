// quantization_config of a config.json: which matrices are in FP8 or MXFP4, and where their scales are.
//
//     quant_method         as                                 scales of <name>.weight
//     fp8                  Qwen3-FP8, MiniMax-M2 ship         <name>.weight_scale_inv, one for a block
//     compressed-tensors   GLM-FP8, llm-compressor write      <name>.weight_scale, one for a block, a row
//                                                             (channel) or a tensor
//     mxfp4                gpt-oss ships                      <name>_scales, one for 32 elements of a row
//
// A tensor's own dtype says whether it is in FP8. What the config leaves out of it is read for plans, which
// have no tensors to ask.
#ifndef MESHFILL_ENGINE_MODEL_QUANTIZATION_CONFIG_H_
#define MESHFILL_ENGINE_MODEL_QUANTIZATION_CONFIG_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "engine/model/layer_shape.h"
#include "engine/model/model_config.h"
#include "engine/model/strict_json.h"

namespace meshfill {

// Reads the key. `config` has its layers, their names and the model's sizes.
absl::Status ParseQuantization(JsonKeys& top, const std::string& path, ModelConfig& config);

// Sets what the shape and the layers' forms say of FP8. `is_wide` says which of the matrices that may be in
// FP8 are not; a product is wide where one of its matrices is.
void SetFp8(const std::function<bool(int layer, const LayerTensor&)>& is_wide, ModelConfig& config);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_QUANTIZATION_CONFIG_H_
