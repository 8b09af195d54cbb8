// Writes lines to a file descriptor without ever making the caller wait.
//
// A thread of its own writes. At most kMaxPendingBytes wait for it: lines beyond that are dropped, and a line
// says how many. Thread-safe.
#ifndef MESHFILL_SERVER_OBSERVE_LOG_WRITER_H_
#define MESHFILL_SERVER_OBSERVE_LOG_WRITER_H_

#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"
#include "server/observe/log_line.h"

namespace meshfill {

class LogWriter {
 public:
  static constexpr size_t kMaxPendingBytes = 1 << 20;
  static constexpr int kLinesOfCause = 50;  // in each second
  static constexpr size_t kMaxCauses = 64;  // more than these share one bound

  LogWriter(int fd, LogFormat format);  // the descriptor outlives the writer
  ~LogWriter();                         // drops what cannot be written at once
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Writes the line of a message (log_line.h).
  void Write(absl::string_view message, const LogDetails& details = {});
  // The same, for what strangers can cause: at most kLinesOfCause lines of a cause in a second. The rest is
  // counted, and one line says how many were left out.
  void WriteLimited(absl::string_view cause, absl::string_view message, const LogDetails& details = {});

  // False where lines are still waiting after the timeout.
  bool Flush(absl::Duration timeout);

 private:
  struct Cause {
    absl::Time begin;  // when its present second began
    int lines = 0;     // lines in that second
    uint64_t left_out = 0;
  };

  // Whether there is a line of this cause left in this second, and room for it; counts it.
  bool TakesLineOf(absl::string_view cause, absl::string_view message);
  // False, and counted, where a line of so many bytes would be dropped.
  bool HasRoom(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lines are formatted without the lock, and only where there is room.
  void Add(absl::string_view message, const LogDetails& details);
  void Append(absl::string_view line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellLeftOut(const std::string& name, Cause& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Begins a new second of the causes whose second is over. Returns when to look again.
  absl::Time EndSeconds(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();
  // Drops what the descriptor does not take once this stops.
  void WriteAll(absl::string_view text);

  const int fd_;
  const LogFormat format_;
  Mutex mu_;
  CondVar changed_;
  std::string pending_ ABSL_GUARDED_BY(mu_);
  uint64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;  // lines, since the last that had room
  std::map<std::string, Cause, std::less<>> causes_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_LOG_WRITER_H_
