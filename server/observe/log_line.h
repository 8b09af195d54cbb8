// One line of the log, in the format that `log.format` of the configuration chooses.
#ifndef MESHFILL_SERVER_OBSERVE_LOG_LINE_H_
#define MESHFILL_SERVER_OBSERVE_LOG_LINE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace meshfill {

enum class LogFormat { kText, kJson };
enum class LogLevel { kInfo, kWarning, kError };

// What belongs to a message beside its text. The names are empty where the message is about no call, or the
// call has none.
struct LogDetails {
  LogLevel level = LogLevel::kInfo;
  absl::string_view request_id = {};
  absl::string_view tenant = {};
  absl::string_view traceparent = {};  // the call's, from its metadata (server/api/traceparent.h)
};

inline constexpr size_t kMaxLogMessageBytes = 8 << 10;  // a longer message is cut
inline constexpr size_t kMaxLogNameBytes = 512;         // a longer name of LogDetails is cut

// The level of the line about a call that ended: info where all is well or the caller left, error where the
// fault is here, otherwise warning.
LogLevel LevelOfEnd(absl::StatusCode code);

// Without its line break. Text has the traceparent alone of the details, since messages name the rest:
//     2026-01-31T12:00:00.123Z MESSAGE traceparent=00-…
//     {"time":"2026-01-31T12:00:00.123Z","level":"info","message":"MESSAGE","request_id":"…","tenant":"…",
//      "traceparent":"00-…"}
// JSON leaves out names that are empty. Its bytes that are no UTF-8 become U+FFFD.
std::string FormatLogLine(LogFormat format, absl::Time time, absl::string_view message,
                          const LogDetails& details);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_LOG_LINE_H_
