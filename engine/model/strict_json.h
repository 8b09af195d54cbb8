// The JSON of a model folder (config.json, index, safetensors headers), read strictly: no duplicate keys,
// bounded depth, nothing behind the value; then key by key, none unread. Free of exceptions, whatever the
// text is.
#ifndef MESHFILL_ENGINE_MODEL_STRICT_JSON_H_
#define MESHFILL_ENGINE_MODEL_STRICT_JSON_H_

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace meshfill {

// The object that `text` holds. INVALID_ARGUMENT: not JSON (with the byte), not an object, a key twice in one
// object, nested deeper than kMaxJsonDepth. `path` is named in errors.
inline constexpr int kMaxJsonDepth = 32;
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& path);

// The content of the file at `path`. NOT_FOUND: no such file. INVALID_ARGUMENT: longer than kMaxJsonBytes, or
// no regular file (a FIFO would never end).
inline constexpr int64_t kMaxJsonBytes = 100'000'000;
absl::StatusOr<std::string> ReadJsonText(const std::string& path);

// A value as errors show it: JSON on one line, in valid UTF-8, cut short after about 80 characters.
std::string Excerpt(const nlohmann::json& value);

// Reads the keys of one JSON object strictly: each is typed and bounded, and one that nobody read is an
// error.
//
// The first error is kept and later reads answer their fallback, so that a caller reads key after key and
// asks once.
class JsonKeys {
 public:
  // `object` outlives this. Errors name `path`, and keys as `prefix` + key ("rope_scaling.factor").
  JsonKeys(const nlohmann::json& object, std::string path, std::string prefix = "")
      : object_(object), path_(std::move(path)), prefix_(std::move(prefix)) {}

  // Null where the key is absent; the value may be JSON's null.
  const nlohmann::json* Find(const char* key);
  // Finds a key as Find does, and takes JSON's null for absent.
  const nlohmann::json* FindValue(const char* key);

  // The key's value; `fallback` where it is absent; an error where it is null, no number or out of bounds.
  int64_t Integer(const char* key, int64_t fallback, int64_t least, int64_t most);
  double Number(const char* key, double fallback, double least, double most);
  bool Flag(const char* key, bool fallback);
  // Integer, with null for nullopt.
  std::optional<int64_t> OptionalInteger(const char* key, std::optional<int64_t> fallback, int64_t least,
                                         int64_t most);
  std::optional<double> OptionalNumber(const char* key, double least, double most);  // absent: nullopt too
  // An error where the key has any value but this one (or null).
  void Expect(const char* key, const nlohmann::json& value);

  // An error at a key: "<path>: key "<key>" is <value>; <what to do>".
  void Reject(const char* key, absl::string_view what_to_do);
  void RejectMissing(const char* key, absl::string_view what_to_do);

  const absl::Status& status() const { return status_; }  // the first error of all reads so far
  // The first error of all reads; else one for the first key that is neither read, nor ignored, nor null.
  absl::Status Finish(std::span<const char* const> ignored = {});

 private:
  void Fail(const std::string& message);

  const nlohmann::json& object_;
  const std::string path_;
  const std::string prefix_;
  std::set<std::string> read_;
  absl::Status status_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_STRICT_JSON_H_
