#include "server/pool/worker/run_watch.h"

#include <gtest/gtest.h>

#include <string>

namespace meshfill {
namespace {

// A rank that never moves, looked at for ten minutes.
class RunWatchTest : public testing::Test {
 protected:
  std::string LookForLong(bool computing, uint64_t run = 5) {
    const WorkerMachine::ProgressOfRuns progress = {
        {run, {{.rank = 3, .operations = 7, .computing = computing}}}};
    std::string trouble;
    for (int look = 0; look < 3000 && trouble.empty(); ++look) {
      trouble = watch_.Look(progress, now_);
      now_ += absl::Milliseconds(200);
    }
    return trouble;
  }

  RunWatch watch_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(RunWatchTest, WhoComputesHasToMove) {
  watch_.Begin(5, 0.1);
  const absl::Time begin = now_;
  EXPECT_NE(LookForLong(/*computing=*/true), "");
  EXPECT_LT(now_ - begin, absl::Minutes(3));
}

TEST_F(RunWatchTest, WhoWaitsForAPeerNeedNot) {
  watch_.Begin(5, 0.1);
  EXPECT_EQ(LookForLong(/*computing=*/false), "");
}

TEST_F(RunWatchTest, NorDoesWhoIsPausedUntilItsTurnComes) {
  watch_.Begin(5, 0.1);
  watch_.SetPaused(5, true);
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  watch_.SetPaused(5, false);
  EXPECT_NE(LookForLong(/*computing=*/true), "");
}

TEST_F(RunWatchTest, WhoStopsHasToMoveInAnyCase) {
  watch_.Begin(5, 0.1);
  watch_.SetPaused(5, true);
  watch_.Stop(5);
  EXPECT_NE(LookForLong(/*computing=*/false), "");
}

TEST_F(RunWatchTest, ALayerMayTakeAsLongAsIsPredicted) {
  watch_.Begin(5, 3600);
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
}

TEST_F(RunWatchTest, LooksAtNothingBeforeTheBeginAndAfterTheEnd) {
  watch_.SetPaused(5, false);
  watch_.Stop(5);
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  watch_.Begin(5, 0.1);
  watch_.End(5);
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  watch_.Begin(5, 0.1);
  EXPECT_EQ(LookForLong(/*computing=*/true, /*run=*/6), "") << "of another";
}

}  // namespace
}  // namespace meshfill
