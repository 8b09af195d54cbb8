// A Hugging Face folder in memory, to be changed and written again: how tests make broken models from good
// ones.
#ifndef MESHFILL_TESTS_ENGINE_MODEL_HF_FOLDER_H_
#define MESHFILL_TESTS_ENGINE_MODEL_HF_FOLDER_H_

#include <map>
#include <string>
#include <vector>

#include "engine/model/safetensors.h"
#include "nlohmann/json.hpp"

namespace meshfill {

struct HfTensor {
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  std::vector<float> Floats() const;  // of F32, BF16, F16 and F8_E4M3, without scales
};

struct HfFolder {
  nlohmann::json config;
  std::map<std::string, HfTensor> tensors;

  static HfFolder Read(const std::string& path);  // one file or shards; aborts where the folder is broken
  void Write(const std::string& path) const;  // config.json and model.safetensors, into an existing folder
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_MODEL_HF_FOLDER_H_
