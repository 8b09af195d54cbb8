#include "server/observe/last_prefill.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

PrefillResult RunOnce(FakeEngine& engine, int64_t tokens, const PrefillOptions& options = {}) {
  const std::vector<uint32_t> ids(tokens, 1);
  auto result = RunPrefill(engine, {ids, options});
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

TEST(LastPrefillTest, KeepsTheReportOfTheLastOne) {
  LastPrefill last;
  EXPECT_EQ(last.report(), nullptr);
  FakeEngine engine;
  last.OnPrefillDone(RunOnce(engine, 1000));
  const auto first = last.report();
  last.OnPrefillDone(RunOnce(engine, 70, {.tile = Tile{1, 4}}));
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->number, 1);
  EXPECT_EQ(first->plan.layout.tokens(), 1000);  // who holds an old report keeps it
  EXPECT_EQ(last.report()->number, 2);
  EXPECT_EQ(last.report()->plan.tile, (Tile{1, 4}));
  EXPECT_EQ(last.report()->ranks.size(), size_t{FakeEngine::kRanks});
}

TEST(LastPrefillTest, CutsTheMiddleLayerOutOfTheTimeline) {
  PrefillResult result{.plan = FakeEngine().MakePlan(100, {})->plan};
  EXPECT_FALSE(result.timeline.has_value());
  result.timeline.emplace(Timeline{.ranks = 4});
  for (int layer = 0; layer < 5; ++layer) {
    result.timeline->spans.push_back(
        {.layer = layer, .start_seconds = layer + 0.5, .end_seconds = layer + 0.75});
    result.timeline->spans.push_back(
        {.layer = layer, .start_seconds = layer + 0.75, .end_seconds = layer + 1.0});
  }
  LastPrefill last;
  last.OnPrefillDone(result);
  const auto report = last.report();
  EXPECT_EQ(report->layer, 2);
  ASSERT_TRUE(report->layer_timeline.has_value());
  ASSERT_EQ(report->layer_timeline->spans.size(), 2u);
  EXPECT_EQ(report->layer_timeline->spans[0].start_seconds, 0);
  EXPECT_EQ(report->layer_timeline->spans[1].end_seconds, 0.5);
  EXPECT_NE(PrefillReportSvg(*report).find("layer 2 as it was measured"), std::string::npos);
}

TEST(LastPrefillTest, NumbersEveryPrefillThoughThreadsReport) {
  FakeEngine engine;
  const PrefillResult result = RunOnce(engine, 10);
  LastPrefill last;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) last.OnPrefillDone(result);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(last.report()->number, 200);
}

}  // namespace
}  // namespace meshfill
