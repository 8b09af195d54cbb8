#include "server/access/file_watch.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "tests/server/eventually.h"

namespace meshfill {
namespace {

// Writes to the file for several periods; false: this machine left it alone for half a period.
bool KeepsWriting(const std::string& path) {
  const absl::Time begin = MonotonicNow();
  absl::Time last = begin;
  for (int i = 0; last < begin + 4 * FileWatch::kPeriod; ++i) {
    std::ofstream(path) << absl::StrCat("half ", i);
    const absl::Time now = MonotonicNow();
    if (now - last > FileWatch::kPeriod / 2) return false;
    last = now;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

// A file that is being written is read when it stands still: half a certificate is none.
TEST(FileWatchTest, AChangeCountsOnceItStandsStill) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    const std::string path = absl::StrCat(testing::TempDir(), "/file_watch_test", attempt);
    std::ofstream(path) << "before";
    std::atomic<int> changes = 0;
    FileWatch watch({path, ""});
    watch.Start([&] { ++changes; });
    if (!KeepsWriting(path)) continue;
    EXPECT_EQ(changes, 0) << "it was still being written";
    EXPECT_TRUE(Eventually([&] { return changes > 0; }));
    const int before = changes;
    std::ofstream(path, std::ios::app) << "more";
    EXPECT_TRUE(Eventually([&] { return changes == before + 1; }));
    std::remove(path.c_str());
    EXPECT_TRUE(Eventually([&] { return changes == before + 2; })) << "a file that is gone has changed";
    return;
  }
  FAIL() << "this machine is too busy to write to a file all the time";
}

// What changes while the first reader is still at it counts.
TEST(FileWatchTest, AChangeBeforeTheStartCounts) {
  const std::string path = absl::StrCat(testing::TempDir(), "/file_watch_test_before");
  std::ofstream(path) << "before";
  std::atomic<int> changes = 0;
  FileWatch watch({path});
  std::ofstream(path, std::ios::app) << "more";
  watch.Start([&] { ++changes; });
  EXPECT_TRUE(Eventually([&] { return changes == 1; }));
  std::remove(path.c_str());
}

int Threads() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

TEST(FileWatchTest, WithoutAFileNothingIsWatched) {
  int before = 0;
  ASSERT_TRUE(Eventually([&] {  // threads that were joined may be there for a moment longer
    const int last = before;
    before = Threads();
    return before == last;
  }));
  FileWatch watch({"", ""});
  watch.Start([] { FAIL(); });
  EXPECT_LE(Threads(), before);
}

}  // namespace
}  // namespace meshfill
