#include "server/access/file_watch.h"

#include <atomic>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

// True as soon as the condition holds; false after 20 s.
template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
  while (!condition()) {
    if (MonotonicNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

// A file that is being written is read when it stands still: half a certificate is none.
TEST(FileWatchTest, AChangeCountsOnceItStandsStill) {
  const std::string path = testing::TempDir() + "/file_watch_test";
  std::ofstream(path) << "before";
  std::atomic<int> changes = 0;
  FileWatch watch({path, ""});
  watch.Start([&] { ++changes; });
  const absl::Time begin = MonotonicNow();
  absl::Time last = begin;
  bool gaps = false;  // a busy machine may leave the file alone for a whole period
  for (int i = 0; MonotonicNow() < begin + 4 * FileWatch::kPeriod; ++i) {
    std::ofstream(path) << absl::StrCat("half ", i);
    gaps = gaps || MonotonicNow() - last > FileWatch::kPeriod / 2;
    last = MonotonicNow();
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(changes == 0 || gaps) << "it was still being written";
  EXPECT_TRUE(Eventually([&] { return changes > 0; }));
  const int before = changes;
  std::ofstream(path, std::ios::app) << "more";
  EXPECT_TRUE(Eventually([&] { return changes == before + 1; }));
  std::remove(path.c_str());
  EXPECT_TRUE(Eventually([&] { return changes == before + 2; })) << "a file that is gone has changed";
}

TEST(FileWatchTest, WithoutAFileNothingIsWatched) {
  FileWatch watch({"", ""});
  watch.Start([] { FAIL(); });
}

}  // namespace
}  // namespace meshfill
