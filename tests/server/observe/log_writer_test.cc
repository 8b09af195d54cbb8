#include "server/observe/log_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

// A log that goes into a pipe, which the test reads when it likes.
class LogWriterTest : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_end_ = ends[0];
    write_end_ = ends[1];
    writer_ = std::make_unique<LogWriter>(write_end_, LogFormat::kText);
  }
  void TearDown() override {
    writer_.reset();
    close(read_end_);
    close(write_end_);
  }

  // All lines are written long before a flush would give up.
  void FlushInTime() {
    const absl::Time deadline = MonotonicNow() + absl::Minutes(1);
    EXPECT_TRUE(writer_->Flush(absl::Minutes(1)));
    EXPECT_LT(MonotonicNow(), deadline);
  }

  // Reads on until `part` is in `text`.
  void ReadTo(const std::string& part, std::string& text) const {
    char buffer[4096];
    while (!absl::StrContains(text, part)) {
      pollfd ready{.fd = read_end_, .events = POLLIN, .revents = 0};
      ASSERT_EQ(poll(&ready, 1, 20'000), 1) << part << " never comes";
      const ssize_t count = read(read_end_, buffer, sizeof(buffer));
      ASSERT_GT(count, 0);
      text.append(buffer, count);
    }
  }

  // All lines that came until now, without their times. Ends the writer.
  std::vector<std::string> Lines() {
    std::string text;
    std::thread reader([&] {
      char buffer[4096];
      for (ssize_t count; (count = read(read_end_, buffer, sizeof(buffer))) > 0;) text.append(buffer, count);
    });
    FlushInTime();
    writer_.reset();
    close(write_end_);
    reader.join();
    write_end_ = dup(read_end_);
    std::vector<std::string> lines;
    for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      EXPECT_EQ(line.find("Z "), 23u) << line;
      lines.emplace_back(line.substr(std::min<size_t>(line.size(), 25)));
    }
    return lines;
  }

  int read_end_ = -1;
  int write_end_ = -1;
  std::unique_ptr<LogWriter> writer_;
};

TEST_F(LogWriterTest, LinesOfSeveralThreadsAreWholeAndInOrder) {
  constexpr int kThreads = 4, kLines = 2000;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] {
      std::mt19937 random(thread);
      for (int line = 0; line < kLines; ++line) {
        writer_->Write(absl::StrCat(thread, " ", line, " ", std::string(random() % 50, 'x'), " end"));
      }
    });
  }
  std::vector<std::string> lines;
  std::thread reader([&] {
    for (std::thread& thread : threads) thread.join();
    lines = Lines();
  });
  reader.join();
  std::vector<int> next(kThreads, 0);
  for (const std::string& line : lines) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    ASSERT_EQ(words.back(), "end") << line;
    int thread = 0, number = 0;
    ASSERT_TRUE(absl::SimpleAtoi(words[0], &thread) && absl::SimpleAtoi(words[1], &number)) << line;
    EXPECT_EQ(number, next[thread]++);
  }
  for (const int count : next) EXPECT_EQ(count, kLines);
}

TEST_F(LogWriterTest, NobodyWaitsForALogThatIsNotRead) {
  constexpr int kLines = 100'000;  // 12 MB: a pipe holds 64 KiB
  const std::string line(100, 'x');
  const absl::Time begin = MonotonicNow();
  for (int i = 0; i < kLines; ++i) writer_->Write(line);
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(10));
  EXPECT_FALSE(writer_->Flush(absl::Milliseconds(20)));

  // It is read again: what had room is there, and lines between say how many had none.
  std::string text;
  char buffer[4096];
  int more = 0;  // lines that may have had no room either
  while (text.find("goes on") == std::string::npos) {
    const ssize_t count = read(read_end_, buffer, sizeof(buffer));
    ASSERT_GT(count, 0);
    text.append(buffer, count);
    writer_->Write("goes on");
    ++more;
  }
  int written = 0, dropped = 0;
  const absl::string_view before = absl::string_view(text).substr(0, text.find("goes on"));
  for (const absl::string_view read : absl::StrSplit(before, '\n')) {
    written += absl::EndsWith(read, line) ? 1 : 0;
    const std::vector<absl::string_view> words = absl::StrSplit(read, ' ');
    int count = 0;
    if (words.size() > 2 && words[1] == "dropped" && absl::SimpleAtoi(words[2], &count)) dropped += count;
  }
  EXPECT_GT(dropped, 0);
  EXPECT_GE(written + dropped, kLines);
  EXPECT_LE(written + dropped, kLines + more);
  EXPECT_LT(text.size(), 3 * LogWriter::kMaxPendingBytes);
}

TEST_F(LogWriterTest, EndsThoughNobodyReads) {
  for (int i = 0; i < 10'000; ++i) writer_->Write(std::string(100, 'x'));
  const absl::Time begin = MonotonicNow();
  writer_.reset();
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(5));
}

// What a cause writes in its second, its share first; false: that took longer than a second.
bool WriteWithinASecond(LogWriter& writer, const std::string& cause, int lines,
                        const std::function<void()>& between) {
  const absl::Time begin = MonotonicNow();
  for (int i = 0; i < lines; ++i) {
    if (i == LogWriter::kLinesOfCause) between();
    writer.WriteLimited(cause, absl::StrCat(cause, " line ", i));
  }
  return MonotonicNow() - begin < absl::Seconds(1);
}

TEST_F(LogWriterTest, ACauseHasItsShareAndTheRestIsCounted) {
  constexpr int kLines = 1000;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const std::string cause = absl::StrCat("cause", attempt);
    const bool within = WriteWithinASecond(*writer_, cause, kLines, [&] {
      writer_->WriteLimited("joins", "joined");
      writer_->Write("unlimited");
      FlushInTime();  // from now on the thread sleeps, and nobody wakes it but what is left out
    });
    if (!within) continue;  // this machine was too busy
    // It tells of it by itself when the second is over, and once.
    const std::string left_out =
        absl::StrCat("left out ", kLines - LogWriter::kLinesOfCause, " more lines of ", cause, "\n");
    std::string text;
    ReadTo(left_out, text);
    writer_->WriteLimited(cause, "of the next second");
    FlushInTime();
    ReadTo(" of the next second\n", text);
    EXPECT_EQ(text.find(left_out), text.rfind(left_out)) << text;
    EXPECT_NE(text.find(" joined\n"), std::string::npos);
    EXPECT_NE(text.find(" unlimited\n"), std::string::npos);
    const std::string line = absl::StrCat(" ", cause, " line ");
    EXPECT_NE(text.find(absl::StrCat(line, LogWriter::kLinesOfCause - 1, "\n")), std::string::npos);
    EXPECT_EQ(text.find(absl::StrCat(line, LogWriter::kLinesOfCause, "\n")), std::string::npos);
    return;
  }
  FAIL() << "this machine is too busy to write a thousand lines in a second";
}

// Who reads may be gone before the server is.
TEST_F(LogWriterTest, ALogWithoutAReaderIsGoneAndNothingElse) {
  close(std::exchange(read_end_, open("/dev/null", O_RDONLY | O_CLOEXEC)));
  for (int i = 0; i < 100; ++i) writer_->Write(std::string(1000, 'x'));
  FlushInTime();
}

// The signals that a thread of this process has blocked, as a mask.
uint64_t BlockedSignals(const std::string& thread) {
  std::ifstream status(absl::StrCat("/proc/self/task/", thread, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("SigBlk:", 0) == 0) return std::stoull(line.substr(7), nullptr, 16);
  }
  return 0;
}

TEST_F(LogWriterTest, SignalsAreForTheOthers) {
  constexpr uint64_t kTerminate = uint64_t{1} << (SIGTERM - 1);
  const std::string own = absl::StrCat(gettid());
  EXPECT_EQ(BlockedSignals(own) & kTerminate, 0u);
  int blocking = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const std::string thread = entry.path().filename();
    if (thread != own && (BlockedSignals(thread) & kTerminate) != 0) ++blocking;
  }
  EXPECT_GE(blocking, 1) << "the writer's";
}

TEST_F(LogWriterTest, CausesAndLinesAreBounded) {
  for (size_t i = 0; i < 3 * LogWriter::kMaxCauses; ++i) {
    writer_->WriteLimited(absl::StrCat("cause ", i), absl::StrCat("line ", i));
  }
  writer_->Write(std::string(1 << 20, 'x'));
  const std::vector<std::string> lines = Lines();
  size_t longest = 0;
  for (const std::string& line : lines) longest = std::max(longest, line.size());
  EXPECT_EQ(longest, kMaxLogMessageBytes);
  // The causes beyond the bound share one.
  EXPECT_LE(lines.size(), LogWriter::kMaxCauses + LogWriter::kLinesOfCause + 2);
  EXPECT_GE(lines.size(), LogWriter::kMaxCauses + LogWriter::kLinesOfCause);
}

}  // namespace
}  // namespace meshfill
