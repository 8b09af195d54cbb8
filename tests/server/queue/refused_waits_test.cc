#include "server/queue/refused_waits.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace meshfill {
namespace {

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(1);

// One was refused, and its prediction took a second.
RefusedWaits AfterOne() {
  RefusedWaits waits;
  waits.Add({.tenant = "a",
             .priority = 0,
             .work_seconds = 30,
             .deadline = kNow + absl::Seconds(60),
             .may_save_seconds = 5},
            45, kNow, kNow + absl::Seconds(1));
  return waits;
}

TEST(RefusedWaitsTest, TellsThoseThatWaitNoLess) {
  RunJob same = {
      .tenant = "a", .work_seconds = 30, .deadline = kNow + absl::Seconds(60), .may_save_seconds = 5};
  RunJob longer = same, later = same, lower = same, colder = same;
  longer.work_seconds = 50;
  later.deadline = absl::InfiniteFuture();
  lower.priority = -1;
  colder.may_save_seconds = 0;
  for (const RunJob& job : {same, longer, later, lower, colder}) {
    EXPECT_EQ(AfterOne().LeastSeconds(job, kNow), 45);
  }
  RunJob shorter = same, urgent = same, higher = same, cached = same, others = same, beside = same,
         packed = same;
  shorter.work_seconds = 29;
  shorter.may_save_seconds = 0;
  urgent.deadline -= absl::Seconds(1);
  higher.priority = 1;
  cached.may_save_seconds = 6;
  others.tenant = "b";
  beside.submeshes = {{.submeshes = 2, .seconds = 40}};
  packed.pack.tokens = 10;
  for (const RunJob& job : {shorter, urgent, higher, cached, others, beside, packed}) {
    EXPECT_EQ(AfterOne().LeastSeconds(job, kNow), 0);
  }
}

TEST(RefusedWaitsTest, CountsForAsLongAsItsPredictionAllows) {
  RefusedWaits waits = AfterOne();
  const RunJob job = {.tenant = "a", .work_seconds = 31};
  EXPECT_EQ(waits.LeastSeconds(job, kNow + absl::Seconds(20.9)), 45);
  EXPECT_EQ(waits.LeastSeconds(job, kNow + absl::Seconds(21)), 0);
}

TEST(RefusedWaitsTest, TheLongestThatIsKnownCounts) {
  RefusedWaits waits = AfterOne();
  const RunJob job = {.tenant = "a", .work_seconds = 100};
  waits.Add(job, 90, kNow, kNow + absl::Seconds(1));
  waits.Add({.tenant = "a", .work_seconds = 1}, 10, kNow, kNow + absl::Seconds(1));
  EXPECT_EQ(waits.LeastSeconds(job, kNow), 90);
}

}  // namespace
}  // namespace meshfill
