#include "engine/model/quantization_config.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/experts.h"
#include "kernels/return_if_error.h"
#include "re2/re2.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr int64_t kMaxBlock = int64_t{1} << 20;

const json& NoObject() {
  static const json no_object = json::object();
  return no_object;
}

// The object at `key`; an error where it is none.
const json& ObjectAt(JsonKeys& keys, const char* key) {
  const json* value = keys.FindValue(key);
  if (value == nullptr) return NoObject();
  if (value->is_object()) return *value;
  keys.Reject(key, "it must be an object");
  return NoObject();
}

// [rows, columns].
Fp8Blocks ReadBlocks(JsonKeys& keys, const char* key) {
  const json* value = keys.FindValue(key);
  if (value == nullptr) {
    keys.RejectMissing(key, "it says which elements share a scale, as [128, 128]");
    return {};
  }
  const auto is_size = [](const json& size) {
    return size.is_number_integer() && size >= 1 && size <= kMaxBlock;
  };
  if (value->is_array() && value->size() == 2 && is_size((*value)[0]) && is_size((*value)[1])) {
    return {.rows = (*value)[0].get<int64_t>(), .columns = (*value)[1].get<int64_t>()};
  }
  keys.Reject(key, "it must be two numbers, as [128, 128]");
  return {};
}

// The modules that a config leaves out of FP8, by name and by pattern.
class LeftOut {
 public:
  // Adds the list at `key`, if there is one. An entry that begins with "re:" is a pattern.
  void Read(JsonKeys& keys, const char* key) {
    const json* entries = keys.FindValue(key);
    if (entries == nullptr) return;
    for (const json& entry : *entries) {
      if (!entries->is_array() || !entry.is_string()) return keys.Reject(key, "it must be a list of names");
      absl::string_view text = entry.get_ref<const std::string&>();
      if (absl::ConsumePrefix(&text, "re:")) {
        patterns_.push_back(std::make_unique<RE2>(std::string(text), RE2::Quiet));
      } else {
        names_.push_back(absl::StrCat(".", text, "."));
      }
    }
  }

  // Whether an entry names the module, one around it, or a part of its name between dots ("mlp"), or its
  // pattern matches where the name begins. A pattern that cannot be read matches all: rather too much memory
  // is planned than too little.
  bool Has(const std::string& module) const {
    const std::string dotted = absl::StrCat(".", module, ".");
    return std::any_of(names_.begin(), names_.end(),
                       [&](const std::string& name) { return absl::StrContains(dotted, name); }) ||
           std::any_of(patterns_.begin(), patterns_.end(), [&](const std::unique_ptr<RE2>& pattern) {
             return !pattern->ok() || pattern->Match(module, 0, module.size(), RE2::ANCHOR_START, nullptr, 0);
           });
  }

 private:
  std::vector<std::string> names_;  // between dots
  std::vector<std::unique_ptr<RE2>> patterns_;
};

// Whether the matrix is left out, by any name that a folder may have for it (language_model.h). All experts
// are taken to be like the first.
bool IsLeftOut(const LeftOut& left_out, const LayerTensor& tensor, int layer) {
  const std::string weight = tensor.WeightName(layer, 0);
  absl::string_view name = weight;
  absl::ConsumePrefix(&name, "model.");
  absl::ConsumeSuffix(&name, ".weight");
  for (const char* around : {"model.", "language_model.model.", "model.language_model."}) {
    if (left_out.Has(absl::StrCat(around, name))) return true;
  }
  return false;
}

void ReadCompressedWeights(JsonKeys& keys, Fp8Config& fp8) {
  keys.Expect("num_bits", 8);
  keys.Expect("type", "float");
  keys.Expect("symmetric", true);
  keys.Expect("dynamic", false);
  keys.Expect("group_size", nullptr);
  for (const char* key : {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"})
    keys.Find(key);
  const json* strategy = keys.FindValue("strategy");
  if (strategy != nullptr && *strategy == "block") {
    fp8.blocks = ReadBlocks(keys, "block_structure");
    return;
  }
  keys.Expect("block_structure", nullptr);
  if (strategy != nullptr && *strategy == "channel") {
    fp8.blocks = {.rows = 1, .columns = Fp8Blocks::kAll};
  } else if (strategy != nullptr && *strategy == "tensor") {
    fp8.blocks = {.rows = Fp8Blocks::kAll, .columns = Fp8Blocks::kAll};
  } else {
    keys.Reject("strategy", "implemented are block, channel and tensor");
  }
}

// Activations stay in the compute dtype, which is more than FP8 asks for. What is measured ahead for them is
// in tensors of their own.
absl::Status ReadCompressedGroup(const json& group, const std::string& path, Fp8Config& fp8) {
  const std::string prefix = "quantization_config.config_groups.";
  JsonKeys keys(group, path, prefix);
  keys.Find("targets");
  keys.Find("format");
  keys.Expect("output_activations", nullptr);
  JsonKeys inputs(ObjectAt(keys, "input_activations"), path, prefix + "input_activations.");
  inputs.Expect("dynamic", true);
  RETURN_IF_ERROR(inputs.status());
  if (keys.FindValue("weights") == nullptr) keys.RejectMissing("weights", "it says how they are in FP8");
  JsonKeys weights(ObjectAt(keys, "weights"), path, prefix + "weights.");
  RETURN_IF_ERROR(keys.Finish());
  ReadCompressedWeights(weights, fp8);
  return weights.Finish();
}

absl::Status ReadCompressed(JsonKeys& keys, const std::string& path, Fp8Config& fp8) {
  fp8.scales = "weight_scale";
  const json* format = keys.FindValue("format");
  if (format == nullptr || (*format != "float-quantized" && *format != "naive-quantized")) {
    keys.Reject("format", "implemented are float-quantized and naive-quantized");
  }
  keys.Expect("kv_cache_scheme", nullptr);
  for (const char* key : {"sparsity_config", "transform_config"}) {
    const json& object = ObjectAt(keys, key);
    if (!object.empty() && object != json{{"format", "dense"}}) keys.Reject(key, "it is not implemented");
  }
  const json& groups = ObjectAt(keys, "config_groups");
  if (groups.size() != 1 || !groups.begin()->is_object()) {
    keys.Reject("config_groups", "it must have one group");
  }
  RETURN_IF_ERROR(keys.status());
  return ReadCompressedGroup(*groups.begin(), path, fp8);
}

void ReadBlockwise(JsonKeys& keys, Fp8Config& fp8, LeftOut& left_out) {
  fp8.scales = "weight_scale_inv";
  const json* format = keys.FindValue("fmt");
  if (format != nullptr && *format != "e4m3" && *format != "float8_e4m3fn") {
    keys.Reject("fmt", "implemented is e4m3, which float8_e4m3fn is by torch's name");
  }
  keys.Expect("activation_scheme", "dynamic");
  keys.Expect("scale_fmt", "float");
  keys.Expect("dequantize", false);
  left_out.Read(keys, "modules_to_not_convert");
  left_out.Read(keys, "ignored_layers");  // what some write for it
  fp8.blocks = ReadBlocks(keys, "weight_block_size");
}

// gpt-oss's: the experts' matrices alone, with a scale for each 32 elements of a row. The list of what is not
// in it says nothing that the tensors' names do not.
void ReadMxfp4(JsonKeys& keys, JsonKeys& top, ModelConfig& config) {
  LeftOut().Read(keys, "modules_to_not_convert");
  keys.Find("dequantize");
  for (const auto& [key, value] :
       {std::pair("hidden_size", config.shape.hidden), {"intermediate_size", config.shape.experts.width}}) {
    if (value % kMxBlock != 0) {
      top.Reject(key, absl::StrCat("weights in mxfp4 need a multiple of ", kMxBlock));
    }
  }
  config.shape.fp4_experts = true;
}

}  // namespace

absl::Status ParseQuantization(JsonKeys& top, const std::string& path, ModelConfig& config) {
  static constexpr const char* kIgnored[] = {"quantization_status", "global_compression_ratio", "version"};
  const json& object = ObjectAt(top, "quantization_config");
  if (top.FindValue("quantization_config") == nullptr || !top.status().ok()) return top.status();
  JsonKeys keys(object, path, "quantization_config.");
  const json* method = keys.FindValue("quant_method");
  if (method != nullptr && *method == "mxfp4" && config.expert_names.gate_up != nullptr) {
    ReadMxfp4(keys, top, config);
    RETURN_IF_ERROR(top.status());
    return keys.Finish(kIgnored);
  }
  LeftOut left_out;
  if (method != nullptr && *method == "fp8") {
    ReadBlockwise(keys, config.fp8, left_out);
  } else if (method != nullptr && *method == "compressed-tensors") {
    left_out.Read(keys, "ignore");
    RETURN_IF_ERROR(ReadCompressed(keys, path, config.fp8));
  } else {
    keys.Reject("quant_method", "implemented are fp8 and compressed-tensors, and mxfp4 of gpt_oss");
  }
  RETURN_IF_ERROR(keys.Finish(kIgnored));
  SetFp8([&](int layer, const LayerTensor& tensor) { return IsLeftOut(left_out, tensor, layer); }, config);
  return absl::OkStatus();
}

void SetFp8(const std::function<bool(int layer, const LayerTensor&)>& is_wide, ModelConfig& config) {
  bool any = false;
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    LayerParts all, wide;
    for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(config, layer))) {
      if (tensor.is_vector() || tensor.part == LayerPart::kRouter) continue;
      all.Add(tensor.part);
      if (!tensor.may_be_fp8() || is_wide(layer, tensor)) wide.Add(tensor.part);
    }
    config.layers[layer].wide = wide;
    any = any || wide != all;
  }
  if (!any) {
    for (LayerForm& layer : config.layers) layer.wide = {};
  }
  config.shape.fp8 = any ? config.fp8.blocks : Fp8Blocks();
  config.shape.kinds = LayerKindsOf(config.layers);
}

}  // namespace meshfill
