#include "server/observe/log.h"

#include <unistd.h>

#include <atomic>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/observe/log_writer.h"

namespace meshfill {
namespace {

constexpr absl::Duration kMoment = absl::Milliseconds(200);

std::atomic<LogFormat> log_format = LogFormat::kText;

// Lives to the very end: other threads may still log while the process ends.
LogWriter& Writer() {
  static LogWriter& writer = *new LogWriter(STDERR_FILENO, log_format);
  return writer;
}

}  // namespace

void SetLogFormat(LogFormat format) { log_format = format; }
LogFormat GetLogFormat() { return log_format; }

void Log(absl::string_view message, const LogDetails& details) { Writer().Write(message, details); }

void LogLimited(absl::string_view cause, absl::string_view message, const LogDetails& details) {
  Writer().WriteLimited(cause, message, details);
}

void FlushLog() { Writer().Flush(kMoment); }

std::string LogQuote(absl::string_view text) { return absl::StrCat("\"", absl::Utf8SafeCEscape(text), "\""); }

std::string RanksText(int64_t ranks) { return absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks"); }

}  // namespace meshfill
