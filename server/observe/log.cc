#include "server/observe/log.h"

#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/observe/log_writer.h"

namespace meshfill {
namespace {

constexpr absl::Duration kMoment = absl::Milliseconds(200);

// Lives to the very end: other threads may still log while the process ends.
LogWriter& Writer() {
  static LogWriter& writer = *new LogWriter(STDERR_FILENO);
  return writer;
}

}  // namespace

void Log(absl::string_view line) { Writer().Write(line); }

void LogLimited(absl::string_view cause, absl::string_view line) { Writer().WriteLimited(cause, line); }

void FlushLog() { Writer().Flush(kMoment); }

std::string LogQuote(absl::string_view text) { return absl::StrCat("\"", absl::Utf8SafeCEscape(text), "\""); }

std::string RanksText(int64_t ranks) { return absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks"); }

}  // namespace meshfill
