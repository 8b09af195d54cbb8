#include "server/stoppable_load.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(StoppableLoadTest, WhatIsLoadedIsReturned) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ShutdownSignals signals;
        std::_Exit(LoadUnlessStopped(signals, [] { return 7; }));
      },
      testing::ExitedWithCode(7), "");
}

TEST(StoppableLoadTest, ALoadThatHangsIsStopped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int signal : {SIGTERM, SIGINT}) {
    EXPECT_EXIT(
        {
          ShutdownSignals signals;
          std::_Exit(LoadUnlessStopped(signals, [signal] {
            kill(getpid(), signal);
            absl::SleepFor(absl::Seconds(30));
            return EXIT_FAILURE;
          }));
        },
        testing::ExitedWithCode(EXIT_SUCCESS), "stopped while loading the model");
  }
}

}  // namespace
}  // namespace meshfill
