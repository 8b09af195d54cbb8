// A language model inside a model that reads images, too, as Gemma 3 ships from 4B on: its config is that
// one's text_config, and the names of its tensors are longer. What reads images is left out.
#ifndef MESHFILL_ENGINE_MODEL_LANGUAGE_MODEL_H_
#define MESHFILL_ENGINE_MODEL_LANGUAGE_MODEL_H_

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/model/safetensors_folder.h"
#include "nlohmann/json.hpp"

namespace meshfill {

// The text_config of `config`, with what the config around it says for it; nullopt: it is no such config.
// Keys of `ignored` may be there. INVALID_ARGUMENT names the key and `path`.
absl::StatusOr<std::optional<nlohmann::json>> FindLanguageConfig(const nlohmann::json& config,
                                                                 const std::string& path,
                                                                 std::span<const char* const> ignored);

// What a folder calls the tensors that are model.* and lm_head.* in one of a language model alone.
class LanguageTensorNames {
 public:
  LanguageTensorNames() = default;  // names of a folder with a language model alone
  // Names in a folder whose language model is inside another, as published.
  static LanguageTensorNames Published();
  // The same as the folder has them: as published, or as transformers names them in memory and some tools
  // write them.
  static LanguageTensorNames In(const SafetensorsFolder& folder);

  std::string InFolder(absl::string_view name) const;
  std::span<const std::string> left_out() const { return left_out_; }  // what others' names begin with

 private:
  std::string model_ = "model.";
  std::string lm_head_ = "lm_head.";
  std::vector<std::string> left_out_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_LANGUAGE_MODEL_H_
