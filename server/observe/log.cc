#include "server/observe/log.h"

#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace meshfill {

void Log(absl::string_view line) {
  const std::string text = absl::StrCat(
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()), " ", line, "\n");
  // One write(2) a line keeps lines of several threads apart. A log that cannot be written must not stop the
  // server.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

std::string LogQuote(absl::string_view text) { return absl::StrCat("\"", absl::Utf8SafeCEscape(text), "\""); }

std::string RanksText(int64_t ranks) { return absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks"); }

}  // namespace meshfill
