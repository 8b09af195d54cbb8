#include "server/cli/progress_bar.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace meshfill {
namespace {

TEST(RenderProgress, GoesByThePaceOfTheLayersThatAreDone) {
  PrefillProgress progress = {.layers_done = 8, .layers = 32, .elapsed_seconds = 10, .computed_seconds = 10};
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [==========>                             ] 8/32 layers   25 %  10.0 s, 30.0 s left");
  progress.elapsed_seconds = 10.5;  // on the way to the next layer
  progress.since_layer_seconds = 0.5;
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [==========>                             ] 8/32 layers   26 %  10.5 s, 29.5 s left");
  progress.elapsed_seconds = 60;  // time alone claims no layer
  progress.since_layer_seconds = 50;
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [===========>                            ] 8/32 layers   28 %  60.0 s, 28.8 s left");
  EXPECT_EQ(
      RenderProgress({.layers_done = 2, .layers = 2, .elapsed_seconds = 0.5, .computed_seconds = 0.5}, 200),
      "prefill [========================================] 2/2 layers  100 %  500 ms");
}

// Before its first layer it may be computing, be put back or have given way: nobody told.
TEST(RenderProgress, ClaimsNothingUntilLayersAreKnown) {
  EXPECT_EQ(RenderProgress({.elapsed_seconds = 3}, 79),
            "prefill [>                                       ] 3.0 s");
  for (const double seconds : {3.0, 30.0}) {
    EXPECT_EQ(RenderProgress({.elapsed_seconds = seconds, .predicted_seconds = 12}, 79),
              absl::StrCat("prefill [>                                       ]   0 %  ",
                           FormatSeconds(seconds), ", 12.0 s left"));
  }
}

TEST(RenderProgress, LeansOnThePredictionUntilTheFirstLayer) {
  PrefillProgress progress = {
      .layers = 4, .elapsed_seconds = 1.5, .since_layer_seconds = 1.5, .predicted_seconds = 12};
  EXPECT_EQ(RenderProgress(progress, 79),
            "prefill [===>                           ] 0/4 layers   12 %  1.5 s, 10.5 s left");
  progress.elapsed_seconds = progress.since_layer_seconds = 30;
  EXPECT_EQ(RenderProgress(progress, 79),
            "prefill [=======>                       ] 0/4 layers   24 %  30.0 s, 9.0 s left");
}

TEST(RenderProgress, SaysWhatIsBeforeItWhileItIsQueued) {
  PrefillProgress progress = {.before = 2, .wait_seconds = 27, .elapsed_seconds = 3, .predicted_seconds = 1};
  EXPECT_EQ(RenderProgress(progress, 79), "queued, 2 before it, about 24.0 s");
  progress.elapsed_seconds = 28;
  EXPECT_EQ(RenderProgress(progress, 79), "queued, 2 before it, soon its turn");
  progress.layers = 4;  // it has begun
  progress.elapsed_seconds = progress.since_layer_seconds = 0.125;
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [=====>                                  ] 0/4 layers   12 %  125 ms, 875 ms left");
}

TEST(RenderProgress, KeepsItsNameWhereTheBarHasNoRoom) {
  const PrefillProgress progress = {.layers = 4, .elapsed_seconds = 4.5, .since_layer_seconds = 4.5};
  EXPECT_EQ(RenderProgress(progress, 33), "prefill [>    ] 0/4 layers  4.5 s");
  EXPECT_EQ(RenderProgress(progress, 32), "prefill 0/4 layers  4.5 s");
  EXPECT_EQ(RenderProgress(progress, 24), "0/4 layers  4.5 s");
}

TEST(RenderProgress, FitsAnyWidth) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const int layers = static_cast<int>(random() % 100);
    const PrefillProgress progress = {
        .before = static_cast<int>(random() % 3),
        .wait_seconds = static_cast<double>(random() % 1000),
        .layers_done = layers == 0 ? 0 : static_cast<int>(random() % (layers + 1)),
        .layers = layers,
        .elapsed_seconds = static_cast<double>(random() % 10000000) / 1000,
        .computed_seconds = static_cast<double>(random() % 10000000) / 1000,
        .since_layer_seconds = static_cast<double>(random() % 10000000) / 1000,
        .predicted_seconds = static_cast<double>(random() % 10000000) / 1000};
    const int width = static_cast<int>(random() % 130);
    EXPECT_LE(RenderProgress(progress, width).size(), static_cast<size_t>(width));
  }
}

// A bar at a time of the test's own.
class ProgressBarTest : public testing::Test {
 protected:
  void Pass(int seconds) { seconds_ += seconds; }
  std::string Line() const { return RenderProgress(bar_.progress(), 90); }
  // What stands beside the bar.
  std::string Facts() const {
    const std::string line = Line();
    return line.substr(line.find(']') + 2);
  }

  std::atomic<int> seconds_ = 0;
  ProgressBar bar_{[this] { return absl::UnixEpoch() + absl::Seconds(seconds_.load()); }};
};

TEST_F(ProgressBarTest, StandsStillWhileNothingComputes) {
  bar_.SetPrediction(32);
  Pass(1000);  // put back before its first layer
  EXPECT_EQ(Facts(), "  0 %  16 min 40 s, 32.0 s left");
  bar_.SetLayersDone(10, 32, 10);
  Pass(1000);  // gave way
  EXPECT_EQ(Facts(), "10/32 layers   34 %  33 min 20 s, 21.0 s left");
}

TEST_F(ProgressBarTest, LeavesPausesOutOfThePace) {
  bar_.SetPrediction(500);
  Pass(10);
  bar_.SetLayersDone(10, 32, 10);
  Pass(101);
  bar_.SetLayersDone(11, 32, 11);
  EXPECT_EQ(Facts(), "11/32 layers   34 %  1 min 51 s, 21.0 s left");
  Pass(1);
  bar_.SetLayersDone(12, 32, 12);
  EXPECT_EQ(Facts(), "12/32 layers   37 %  1 min 52 s, 20.0 s left");
}

TEST_F(ProgressBarTest, CountsFromThePrefillsBeginOnceItHasWaited) {
  bar_.SetPrediction(8, /*before=*/1, /*wait_seconds=*/50);
  Pass(30);
  EXPECT_EQ(Line(), "queued, 1 before it, about 20.0 s");
  Pass(30);
  bar_.SetLayersDone(1, 4, 2);
  EXPECT_EQ(Facts(), "1/4 layers   25 %  2.0 s, 6.0 s left");
}

// Four layers took 40 s when a worker was lost; of the new run one is done, by the prediction in 8 s.
TEST_F(ProgressBarTest, LeavesLostRunsOutOfThePace) {
  bar_.SetPrediction(32);
  Pass(40);
  bar_.SetLayersDone(4, 4, 40);
  Pass(20);
  bar_.SetLayersDone(1, 4, 60);
  EXPECT_EQ(Facts(), "1/4 layers   25 %  60.0 s, 24.0 s left");
  Pass(4);
  bar_.SetLayersDone(2, 4, 64);
  EXPECT_EQ(Facts(), "2/4 layers   50 %  64.0 s, 12.0 s left");
}

TEST(FormatSeconds, TakesTheUnitThatReadsBest) {
  EXPECT_EQ(FormatSeconds(0), "0 ms");
  EXPECT_EQ(FormatSeconds(0.8204), "820 ms");
  EXPECT_EQ(FormatSeconds(0.99949), "999 ms");
  EXPECT_EQ(FormatSeconds(0.9996), "1.0 s");
  EXPECT_EQ(FormatSeconds(99.96), "1 min 40 s");
  EXPECT_EQ(FormatSeconds(245), "4 min 05 s");
  EXPECT_EQ(FormatSeconds(7380), "2 h 03 min");
}

}  // namespace
}  // namespace meshfill
