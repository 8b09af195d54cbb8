#include "server/observe/liveness.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/observe/http_get.h"

namespace meshfill {
namespace {

using At = StandstillWatch::At;

class StandstillWatchTest : public testing::Test {
 protected:
  // The same is seen for so long, ten times in a second.
  std::string LookFor(absl::Duration time, const std::vector<At>& all) {
    std::string standstill;
    for (const absl::Time end = now_ + time; now_ < end; now_ += absl::Milliseconds(100)) {
      standstill = watch_.Look(all, now_);
    }
    return standstill;
  }

  absl::Time now_ = absl::UnixEpoch();
  StandstillWatch watch_;
};

TEST_F(StandstillWatchTest, AFrozenRankIsNamed) {
  const std::vector<At> all = {{.run = 7, .rank = 0, .moves = 3, .has_to_move = false},
                               {.run = 7, .rank = 1, .moves = 5}};
  EXPECT_EQ(LookFor(absl::Milliseconds(120'100), all), "") << "it has stood still for two minutes";
  EXPECT_EQ(LookFor(absl::Milliseconds(100), all), "rank 1 of run 7 has stood still for 2m");
  EXPECT_EQ(LookFor(absl::Milliseconds(1'500), all), "rank 1 of run 7 has stood still for 2m1s");
  EXPECT_EQ(LookFor(absl::Seconds(1), {{.run = 7, .rank = 1, .moves = 6}}), "") << "it goes on";
}

TEST_F(StandstillWatchTest, ALongKernelIsNone) {
  const std::vector<At> all = {{.run = 1, .moves = 5, .predicted_seconds = 60}};
  EXPECT_EQ(LookFor(absl::Minutes(19), all), "");
  EXPECT_NE(LookFor(absl::Minutes(2), all), "");
  // Predictions may be nonsense: a leader sends them.
  EXPECT_EQ(LookFor(absl::Minutes(1), {{.run = 2, .predicted_seconds = -1}}), "");
  EXPECT_EQ(LookFor(absl::Minutes(10), {{.run = 3, .predicted_seconds = 1e300}}), "");
}

TEST_F(StandstillWatchTest, WhoWaitsOrEndsIsForgotten) {
  for (int round = 0; round < 4; ++round) {
    EXPECT_EQ(LookFor(absl::Seconds(100), {{.run = 1, .moves = 5}}), "");
    EXPECT_EQ(LookFor(absl::Seconds(1), {{.run = 1, .moves = 5, .has_to_move = false}}), "");
    EXPECT_EQ(LookFor(absl::Seconds(100), {{.run = 1, .moves = 5}}), "");
    EXPECT_EQ(LookFor(absl::Seconds(1), {}), "");
  }
}

TEST(LivenessTest, ThePageFollowsTheLoopAndTheRanks) {
  absl::Time now = absl::UnixEpoch();
  Liveness liveness([&now] { return now; });
  const auto pages = HttpPages::Listen("127.0.0.1:0", {liveness.Page()});
  ASSERT_TRUE(pages.ok()) << pages.status();
  const auto answer = [&] { return HttpGet((*pages)->address(), "/healthz"); };
  now += absl::Hours(1);
  EXPECT_NE(answer().find(" 200 "), std::string::npos) << "it still loads";
  liveness.Beat("");
  now += Liveness::kLongestSilence;
  EXPECT_EQ(HttpBody(answer()), "lives\n");
  now += absl::Seconds(1);
  EXPECT_NE(answer().find(" 503 "), std::string::npos);
  EXPECT_EQ(HttpBody(answer()), "the main loop has stood still for 31s\n");
  liveness.Beat("rank 1 of run 7 has stood still for 2m1s");
  EXPECT_NE(answer().find(" 503 "), std::string::npos);
  EXPECT_EQ(HttpBody(answer()), "rank 1 of run 7 has stood still for 2m1s\n");
  liveness.Beat("");
  EXPECT_NE(answer().find(" 200 "), std::string::npos);
}

}  // namespace
}  // namespace meshfill
