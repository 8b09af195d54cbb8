#include "server/observe/log_writer.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

constexpr absl::Duration kSecond = absl::Seconds(1);
constexpr int kPollMilliseconds = 50;  // between two looks at whether the writer stops
constexpr char kOtherCauses[] = "other causes";
constexpr LogDetails kTrouble = {.level = LogLevel::kWarning};

}  // namespace

LogWriter::LogWriter(int fd, LogFormat format) : fd_(fd), format_(format) {
  // Signals are for the threads that wait for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

LogWriter::~LogWriter() {
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void LogWriter::Write(absl::string_view message, const LogDetails& details) {
  {
    const MutexLock lock(mu_);
    if (!HasRoom(std::min(message.size(), kMaxLogMessageBytes))) return;
  }
  Add(message, details);
}

void LogWriter::WriteLimited(absl::string_view cause_name, absl::string_view message,
                             const LogDetails& details) {
  if (TakesLineOf(cause_name, message)) Add(message, details);
}

bool LogWriter::TakesLineOf(absl::string_view cause_name, absl::string_view message) {
  const absl::Time now = MonotonicNow();
  const MutexLock lock(mu_);
  auto entry = causes_.find(cause_name);
  if (entry == causes_.end()) {
    const bool room = causes_.size() < kMaxCauses;
    entry = causes_.try_emplace(room ? std::string(cause_name) : kOtherCauses).first;
  }
  Cause& cause = entry->second;
  if (cause.lines == 0 || now >= cause.begin + kSecond) {
    TellLeftOut(entry->first, cause);
    cause = {.begin = now};
  }
  if (++cause.lines > kLinesOfCause) {
    if (cause.left_out++ == 0) changed_.NotifyAll();  // the thread tells of it when the second is over
    return false;
  }
  return HasRoom(std::min(message.size(), kMaxLogMessageBytes));
}

void LogWriter::TellLeftOut(const std::string& name, Cause& cause) {
  if (cause.left_out == 0) return;
  Append(FormatLogLine(format_, absl::Now(),
                       absl::StrCat("left out ", cause.left_out, " more lines of ", name), kTrouble));
  cause.left_out = 0;
}

bool LogWriter::HasRoom(size_t bytes) {
  if (pending_.size() + bytes <= kMaxPendingBytes) return true;
  ++dropped_;
  return false;
}

void LogWriter::Add(absl::string_view message, const LogDetails& details) {
  const std::string line = FormatLogLine(format_, absl::Now(), message, details);
  const MutexLock lock(mu_);
  Append(line);
}

void LogWriter::Append(absl::string_view line) {
  if (!HasRoom(line.size())) return;
  if (dropped_ > 0) {
    const std::string dropped = absl::StrCat("dropped ", dropped_, " lines that nobody read in time");
    absl::StrAppend(&pending_, FormatLogLine(format_, absl::Now(), dropped, kTrouble), "\n");
    dropped_ = 0;
  }
  absl::StrAppend(&pending_, line, "\n");
  changed_.NotifyAll();
}

bool LogWriter::Flush(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(mu_);
  while ((writing_ || !pending_.empty()) && MonotonicNow() < deadline) changed_.WaitUntil(mu_, deadline);
  return !writing_ && pending_.empty();
}

absl::Time LogWriter::EndSeconds(absl::Time now) {
  absl::Time next = absl::InfiniteFuture();
  for (auto& [name, cause] : causes_) {
    if (cause.left_out == 0) continue;
    if (now >= cause.begin + kSecond) {
      TellLeftOut(name, cause);
    } else {
      next = std::min(next, cause.begin + kSecond);
    }
  }
  return next;
}

void LogWriter::Run() {
  MutexLock lock(mu_);
  while (true) {
    const absl::Time next = EndSeconds(MonotonicNow());
    if (pending_.empty()) {
      if (stopping_) return;
      changed_.WaitUntil(mu_, next);
      continue;
    }
    const std::string text = std::exchange(pending_, {});
    writing_ = true;
    lock.Unlock();
    WriteAll(text);
    lock.Lock();
    writing_ = false;
    changed_.NotifyAll();
  }
}

void LogWriter::WriteAll(absl::string_view text) {
  while (!text.empty()) {
    // A pipe that is ready takes this much without waiting.
    const size_t size = std::min<size_t>(text.size(), PIPE_BUF);
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (poll(&ready, 1, kPollMilliseconds) <= 0) {
      const MutexLock lock(mu_);
      if (stopping_) return;
      continue;
    }
    const ssize_t written = write(fd_, text.data(), size);
    if (written < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    // A log that cannot be written must not stop the server: its text is gone.
    text.remove_prefix(written > 0 ? static_cast<size_t>(written) : size);
  }
}

}  // namespace meshfill
