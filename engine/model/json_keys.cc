#include "engine/model/json_keys.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/model/strict_json.h"

namespace meshfill {
namespace {

using nlohmann::json;

std::optional<int64_t> AsInteger(const json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    return std::nullopt;
  }
  return value.get<int64_t>();
}

}  // namespace

const json* JsonKeys::Find(const char* key) {
  read_.insert(key);
  const auto it = object_.find(key);
  return it == object_.end() ? nullptr : &*it;
}

const json* JsonKeys::FindValue(const char* key) {
  const json* value = Find(key);
  return value != nullptr && value->is_null() ? nullptr : value;
}

int64_t JsonKeys::Integer(const char* key, int64_t fallback, int64_t least, int64_t most) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  const std::optional<int64_t> number = AsInteger(*value);
  if (number && *number >= least && *number <= most) return *number;
  Reject(key, absl::StrCat("it must be an integer from ", least, " to ", most));
  return fallback;
}

double JsonKeys::Number(const char* key, double fallback, double least, double most) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_number() && value->get<double>() >= least && value->get<double>() <= most) {
    return value->get<double>();
  }
  Reject(key, absl::StrCat("it must be a number from ", least, " to ", most));
  return fallback;
}

bool JsonKeys::Flag(const char* key, bool fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Reject(key, "it must be true or false");
  return fallback;
}

std::optional<int64_t> JsonKeys::OptionalInteger(const char* key, std::optional<int64_t> fallback,
                                                 int64_t least, int64_t most) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_null()) return std::nullopt;
  return Integer(key, least, least, most);
}

std::optional<double> JsonKeys::OptionalNumber(const char* key, double least, double most) {
  if (FindValue(key) == nullptr) return std::nullopt;
  return Number(key, least, least, most);
}

void JsonKeys::Expect(const char* key, const json& value) {
  const json* found = FindValue(key);
  if (found != nullptr && *found != value) {
    Reject(key, absl::StrCat("only ", Excerpt(value), " is implemented"));
  }
}

void JsonKeys::Reject(const char* key, absl::string_view what_to_do) {
  const auto it = object_.find(key);
  const std::string value = it == object_.end() ? "absent" : Excerpt(*it);
  Fail(absl::StrCat("key \"", prefix_, key, "\" is ", value, "; ", what_to_do));
}

void JsonKeys::RejectMissing(const char* key, absl::string_view what_to_do) {
  Fail(absl::StrCat("key \"", prefix_, key, "\" is missing; ", what_to_do));
}

absl::Status JsonKeys::Finish(std::span<const char* const> ignored) {
  for (const auto& [key, value] : object_.items()) {
    const bool known = read_.contains(key) || value.is_null() ||
                       std::find(ignored.begin(), ignored.end(), key) != ignored.end();
    if (!known) {
      Fail(absl::StrCat("key ", Excerpt(prefix_ + key), " is ", Excerpt(value),
                        ", which this program does not implement; use a model without it"));
    }
  }
  return status_;
}

void JsonKeys::Fail(const std::string& message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(path_, ": ", message));
}

}  // namespace meshfill
