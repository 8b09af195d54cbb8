#include "server/cli/progress_bar.h"

#include <gtest/gtest.h>

#include <random>

namespace meshfill {
namespace {

TEST(RenderProgress, GoesByThePaceOfTheLayersThatAreDone) {
  PrefillProgress progress = {.layers_done = 8, .layers = 32, .elapsed_seconds = 10, .layer_seconds = 10};
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [==========>                             ] 8/32 layers   25 %  10.0 s, 30.0 s left");
  progress.elapsed_seconds = 10.5;  // on the way to the next layer
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [==========>                             ] 8/32 layers   26 %  10.5 s, 29.5 s left");
  progress.elapsed_seconds = 60;  // time alone claims no layer
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [===========>                            ] 8/32 layers   28 %  60.0 s");
  EXPECT_EQ(
      RenderProgress({.layers_done = 2, .layers = 2, .elapsed_seconds = 0.5, .layer_seconds = 0.5}, 200),
      "prefill [========================================] 2/2 layers  100 %  500 ms");
}

TEST(RenderProgress, LeansOnThePredictionUntilTheFirstLayer) {
  EXPECT_EQ(RenderProgress({.elapsed_seconds = 3}, 79),
            "prefill [>                                       ] 3.0 s");
  EXPECT_EQ(RenderProgress({.elapsed_seconds = 3, .predicted_seconds = 12}, 79),
            "prefill [==========>                             ]  25 %  3.0 s, 9.0 s left");
  EXPECT_EQ(RenderProgress({.layers = 4, .elapsed_seconds = 30, .predicted_seconds = 12}, 79),
            "prefill [=========>                              ] 0/4 layers   24 %  30.0 s");
}

TEST(RenderProgress, SaysWhatIsBeforeItWhileItIsQueued) {
  PrefillProgress progress = {.before = 2, .wait_seconds = 27, .elapsed_seconds = 3, .predicted_seconds = 1};
  EXPECT_EQ(RenderProgress(progress, 79), "queued, 2 before it, about 24.0 s");
  progress.elapsed_seconds = 28;
  EXPECT_EQ(RenderProgress(progress, 79), "queued, 2 before it, soon its turn");
  progress.layers = 4;  // it has begun
  progress.elapsed_seconds = 0.5;
  EXPECT_EQ(RenderProgress(progress, 90),
            "prefill [=========>                              ] 0/4 layers   24 %  500 ms, 500 ms left");
}

TEST(RenderProgress, KeepsItsNameWhereTheBarHasNoRoom) {
  const PrefillProgress progress = {.layers = 4, .elapsed_seconds = 4.5, .predicted_seconds = 2};
  EXPECT_EQ(RenderProgress(progress, 40), "prefill [=>   ] 0/4 layers   24 %  4.5 s");
  EXPECT_EQ(RenderProgress(progress, 39), "prefill 0/4 layers   24 %  4.5 s");
  EXPECT_EQ(RenderProgress(progress, 30), "0/4 layers   24 %  4.5 s");
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
        .predicted_seconds = static_cast<double>(random() % 10000000) / 1000};
    const int width = static_cast<int>(random() % 130);
    EXPECT_LE(RenderProgress(progress, width).size(), static_cast<size_t>(width));
  }
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
