// The log while it is written, for tests that wait for a line: what gtest captures is read at its end alone.
#ifndef MESHFILL_TESTS_SERVER_CAPTURED_LOG_H_
#define MESHFILL_TESTS_SERVER_CAPTURED_LOG_H_

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <string>

#include "gtest/gtest.h"
#include "server/observe/log.h"

namespace meshfill {

// Takes standard error to the end of its scope.
class CapturedLog {
 public:
  CapturedLog() {
    FlushLog();
    EXPECT_GE(dup2(file_, STDERR_FILENO), 0);
  }
  ~CapturedLog() {
    FlushLog();
    dup2(stderr_, STDERR_FILENO);
    close(stderr_);
    close(file_);
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  // All lines so far.
  std::string Text() const {
    FlushLog();
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = pread(file_, buffer, sizeof(buffer), static_cast<off_t>(text.size()))) > 0;) {
      text.append(buffer, static_cast<size_t>(got));
    }
    return text;
  }
  // How often the lines so far have the text.
  int CountOf(const std::string& part) const {
    const std::string text = Text();
    int count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  }

 private:
  const int file_ = memfd_create("captured_log", MFD_CLOEXEC);
  const int stderr_ = dup(STDERR_FILENO);
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_CAPTURED_LOG_H_
