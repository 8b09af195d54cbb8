#include "engine/model/strict_json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

using nlohmann::json;

// Builds the document and stops at the first thing that is wrong.
class StrictBuilder final : public nlohmann::json_sax<json> {
 public:
  json& document() { return document_; }
  const std::string& error() const { return error_; }

  bool null() override { return Add(json(nullptr)); }
  bool boolean(bool value) override { return Add(json(value)); }
  bool number_integer(number_integer_t value) override { return Add(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return Add(json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return Add(json(value)); }
  bool string(string_t& value) override { return Add(json(std::move(value))); }
  bool binary(binary_t&) override { return Fail("holds binary data"); }

  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& key) override {
    json& object = *open_.back();
    if (object.contains(key)) {
      return Fail(absl::StrCat("the key ", Excerpt(key), " appears twice in one object"));
    }
    member_ = &object[key];
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("no valid JSON at byte ", position));
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  json* Place(json value) {
    if (open_.empty()) return &(document_ = std::move(value));
    if (open_.back()->is_object()) return &(*member_ = std::move(value));
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }

  bool Add(json value) {
    Place(std::move(value));
    return true;
  }

  bool Open(json value) {
    if (open_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      return Fail(absl::StrCat("nested deeper than ", kMaxJsonDepth, " levels"));
    }
    open_.push_back(Place(std::move(value)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  json document_;
  std::vector<json*> open_;  // the objects and arrays that are not closed yet, outermost first
  json* member_ = nullptr;   // where the innermost object's next value goes
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseJsonObject(std::string_view text, const std::string& path) {
  StrictBuilder builder;
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", builder.error(), "; fetch or write the file again"));
  }
  if (!builder.document().is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": holds ", Excerpt(builder.document()),
                     " where a JSON object belongs; fetch or write the file again"));
  }
  return std::move(builder.document());
}

absl::StatusOr<std::string> ReadJsonText(const std::string& path) {
  // A FIFO would wait for a writer: without one it opens at once, and is refused below.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    absl::Status failed =
        absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be opened; check the path"));
    const bool told = absl::IsNotFound(failed) || absl::IsResourceExhausted(failed);
    return told ? failed : absl::InvalidArgumentError(failed.message());
  }
  const absl::Cleanup close_it = [descriptor] { close(descriptor); };
  struct stat info;
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is no regular file; fetch or write it again"));
  }
  if (info.st_size > kMaxJsonBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has ", info.st_size, " bytes, more than the ",
                                                   kMaxJsonBytes, " allowed; fetch or write the file again"));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = read(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be read"));
    if (count == 0) text.resize(done);  // it has shrunk
    done += static_cast<size_t>(count);
  }
  return text;
}

std::string Excerpt(const json& value) {
  constexpr size_t kLongest = 80;
  if (value.is_string() && value.get_ref<const std::string&>().size() > 2 * kLongest) {
    return Excerpt(value.get_ref<const std::string&>().substr(0, kLongest)) + "…";
  }
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  return text.size() <= 2 * kLongest ? text : text.substr(0, kLongest) + "…";
}

// ---- JsonKeys.

namespace {

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
