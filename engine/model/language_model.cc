#include "engine/model/language_model.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/model/family.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;

// The family whose models are inside such ones; null: `config` is none of these.
const Family* FamilyInside(const json& config) {
  for (const Family* family : Families()) {
    if (family->outer_architecture == nullptr) continue;
    const json architectures = config.value("architectures", json());
    if (architectures == json::array({family->outer_architecture})) return family;
    if (architectures.is_null() && config.value("model_type", json()) == family->outer_model_type)
      return family;
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<std::optional<json>> FindLanguageConfig(const json& config, const std::string& path,
                                                       std::span<const char* const> ignored) {
  const Family* family = FamilyInside(config);
  if (family == nullptr) return std::nullopt;
  JsonKeys keys(config, path);
  keys.Find("architectures");
  keys.Expect("model_type", family->outer_model_type);
  const json* text = keys.FindValue("text_config");
  if (text == nullptr) {
    keys.RejectMissing("text_config", "it says what the language model is");
  } else if (!text->is_object()) {
    keys.Reject("text_config", "it must be an object");
  }
  RETURN_IF_ERROR(keys.status());

  JsonKeys text_keys(*text, path, "text_config.");
  text_keys.Expect("model_type", family->config_name());
  RETURN_IF_ERROR(text_keys.status());

  json language = *text;
  language["model_type"] = family->config_name();
  for (const char* key : {"dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"}) {
    const json* value = keys.FindValue(key);
    if (value != nullptr) language.emplace(key, *value);
  }
  if (const json* tied = keys.FindValue("tie_word_embeddings"); tied != nullptr) {
    if (*tied != language["tie_word_embeddings"])
      keys.Reject("tie_word_embeddings", "text_config says another");
  }
  // Ignored: they are about images.
  for (const char* key : {"vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
                          "image_token_index", "boi_token_id", "eoi_token_id", "image_token_id"}) {
    keys.Find(key);
  }
  RETURN_IF_ERROR(keys.Finish(ignored));
  return language;
}

LanguageTensorNames LanguageTensorNames::Published() {
  LanguageTensorNames names;
  names.model_ = "language_model.model.";
  names.lm_head_ = "language_model.lm_head.";
  names.left_out_ = {"vision_tower.", "multi_modal_projector."};
  return names;
}

LanguageTensorNames LanguageTensorNames::In(const SafetensorsFolder& folder) {
  LanguageTensorNames names = Published();
  if (folder.Find(names.InFolder("model.embed_tokens.weight")) != nullptr) return names;
  names.model_ = "model.language_model.";
  names.lm_head_ = "lm_head.";
  for (std::string& part : names.left_out_) part = absl::StrCat("model.", part);
  return names;
}

std::string LanguageTensorNames::InFolder(absl::string_view name) const {
  if (absl::ConsumePrefix(&name, "model.")) return absl::StrCat(model_, name);
  if (absl::ConsumePrefix(&name, "lm_head.")) return absl::StrCat(lm_head_, name);
  return std::string(name);
}

}  // namespace meshfill
