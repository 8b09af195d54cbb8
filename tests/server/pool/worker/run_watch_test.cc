#include "server/pool/worker/run_watch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

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

  void Begin(uint64_t run, double seconds, int layers) {
    Plan plan{{.layout = TokenLayout::Make(LayoutKind::kStriped, 1, 1, 1).value()}};
    plan.predicted.seconds = seconds;
    watch_.Hear(WorkerMachine::PrepareRun{.part = {.number = run, .plan = std::move(plan)}}, layers);
  }
  void Hear(const WorkerMachine::Action& action) { watch_.Hear(action, /*layers=*/1); }

  RunWatch watch_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(RunWatchTest, WhoComputesHasToMove) {
  Begin(5, 0.1, 1);
  const absl::Time begin = now_;
  EXPECT_NE(LookForLong(/*computing=*/true), "");
  EXPECT_LT(now_ - begin, absl::Minutes(3));
}

TEST_F(RunWatchTest, WhoWaitsForAPeerNeedNot) {
  Begin(5, 0.1, 1);
  EXPECT_EQ(LookForLong(/*computing=*/false), "");
}

TEST_F(RunWatchTest, NorDoesWhoIsPausedUntilItsTurnComes) {
  Begin(5, 0.1, 1);
  Hear(WorkerMachine::PauseRun{.run = 5});
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  Hear(WorkerMachine::ResumeRun{.run = 5});
  EXPECT_NE(LookForLong(/*computing=*/true), "");
}

TEST_F(RunWatchTest, WhoStopsHasToMoveInAnyCase) {
  Begin(5, 0.1, 1);
  Hear(WorkerMachine::PauseRun{.run = 5});
  Hear(WorkerMachine::StopRun{.run = 5});
  EXPECT_NE(LookForLong(/*computing=*/false), "");
}

TEST_F(RunWatchTest, ALayerMayTakeAsLongAsIsPredicted) {
  Begin(5, 7200, 2);
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  Begin(5, 7200, 72000);
  EXPECT_NE(LookForLong(/*computing=*/true), "") << "a layer is not the whole run";
}

TEST_F(RunWatchTest, LooksAtNothingBeforeTheBeginAndAfterTheEnd) {
  Hear(WorkerMachine::ResumeRun{.run = 5});
  Hear(WorkerMachine::StopRun{.run = 5});
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  Begin(5, 0.1, 1);
  watch_.End(5);
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  Begin(5, 0.1, 1);
  Hear(WorkerMachine::ReleaseRun{.run = 5});
  EXPECT_EQ(LookForLong(/*computing=*/true), "");
  Begin(5, 0.1, 1);
  EXPECT_EQ(LookForLong(/*computing=*/true, /*run=*/6), "") << "of another";
}

}  // namespace
}  // namespace meshfill
