// The server's log: one line for each event, on standard error. Writing a line never waits (log_writer.h).
#ifndef MESHFILL_SERVER_OBSERVE_LOG_H_
#define MESHFILL_SERVER_OBSERVE_LOG_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "server/observe/log_line.h"

namespace meshfill {

// Call once, before the first line. Without it lines are text.
void SetLogFormat(LogFormat format);
LogFormat GetLogFormat();

// Writes a line (log_line.h). Lines of several threads never mix. `message` holds no line break; text in it
// that came from outside is quoted with LogQuote.
void Log(absl::string_view message, const LogDetails& details = {});

// The same, for what strangers can cause: of each cause, only so many lines are written in a second, and
// then how many were left out. `cause` is one of a fixed set.
void LogLimited(absl::string_view cause, absl::string_view message, const LogDetails& details = {});

// Waits until all lines are written, for a moment at most. For the end of a process.
void FlushLog();

// Does so at the end of its scope.
struct LogFlush {
  LogFlush() = default;
  ~LogFlush() { FlushLog(); }
  LogFlush(const LogFlush&) = delete;
  LogFlush& operator=(const LogFlush&) = delete;
};

// The text with everything escaped that could break or forge a line: "a\nb" becomes "a\\nb", in double
// quotes.
std::string LogQuote(absl::string_view text);

// "1 rank", "4 ranks".
std::string RanksText(int64_t ranks);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_LOG_H_
