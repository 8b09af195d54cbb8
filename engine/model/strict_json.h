// The JSON of a model folder (config.json, index, safetensors headers), read strictly: no duplicate keys,
// bounded depth, nothing behind the value. Free of exceptions, whatever the text is.
#ifndef MESHFILL_ENGINE_MODEL_STRICT_JSON_H_
#define MESHFILL_ENGINE_MODEL_STRICT_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace meshfill {

// The object that `text` holds. INVALID_ARGUMENT: not JSON (with the byte), not an object, a key twice in one
// object, nested deeper than kMaxJsonDepth. `path` is named in errors.
inline constexpr int kMaxJsonDepth = 32;
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& path);

// The content of the file at `path`. NOT_FOUND: no such file. INVALID_ARGUMENT: longer than kMaxJsonBytes.
inline constexpr int64_t kMaxJsonBytes = 100'000'000;
absl::StatusOr<std::string> ReadJsonText(const std::string& path);

// A value as errors show it: JSON on one line, in valid UTF-8, cut short after about 80 characters.
std::string Excerpt(const nlohmann::json& value);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_STRICT_JSON_H_
