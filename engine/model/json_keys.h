// Reads the keys of one JSON object strictly: each is typed and bounded, and one that nobody read is an
// error.
//
// The first error is kept and later reads answer their fallback, so that a caller reads key after key and
// asks once.
#ifndef MESHFILL_ENGINE_MODEL_JSON_KEYS_H_
#define MESHFILL_ENGINE_MODEL_JSON_KEYS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace meshfill {

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
  // The same, with null for nullopt.
  std::optional<int64_t> OptionalInteger(const char* key, std::optional<int64_t> fallback, int64_t least,
                                         int64_t most);
  std::optional<double> OptionalNumber(const char* key, double least, double most);  // absent: nullopt too
  // An error where the key has any value but this one (or null).
  void Expect(const char* key, const nlohmann::json& value);

  // An error at a key: "<path>: key "<key>" is <value>; <what to do>".
  void Reject(const char* key, absl::string_view what_to_do);
  void RejectMissing(const char* key, absl::string_view what_to_do);

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

#endif  // MESHFILL_ENGINE_MODEL_JSON_KEYS_H_
