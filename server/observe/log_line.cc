#include "server/observe/log_line.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

const char* LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "?";
}

}  // namespace

LogLevel LevelOfEnd(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
      return LogLevel::kInfo;
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
      return LogLevel::kError;
    default:
      return LogLevel::kWarning;
  }
}

std::string FormatLogLine(LogFormat format, absl::Time time, absl::string_view message,
                          const LogDetails& details) {
  const std::string now = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
  message = message.substr(0, kMaxLogMessageBytes);
  const absl::string_view traceparent = details.traceparent.substr(0, kMaxLogNameBytes);
  if (format == LogFormat::kText) {
    return absl::StrCat(now, " ", message, traceparent.empty() ? "" : " traceparent=", traceparent);
  }
  Json line = {{"time", now}, {"level", LevelName(details.level)}, {"message", message}};
  const auto add = [&line](const char* name, absl::string_view value) {
    if (!value.empty()) line[name] = value.substr(0, kMaxLogNameBytes);
  };
  add("request_id", details.request_id);
  add("tenant", details.tenant);
  add("traceparent", traceparent);
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace meshfill
