#include "server/observe/last_prefill.h"

#include <algorithm>
#include <regex>
#include <string>
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
  result.timeline.emplace(Timeline{.ranks = 4, .dropped_spans = 3});
  for (int layer = 0; layer < 5; ++layer) {
    result.timeline->spans.push_back(
        {.layer = layer, .start_seconds = layer + 0.75, .end_seconds = layer + 1.0});
    result.timeline->spans.push_back(
        {.layer = layer, .start_seconds = layer + 0.5, .end_seconds = layer + 0.75});
    result.timeline->spans.push_back(
        {.layer = layer, .start_seconds = layer + 0.625, .end_seconds = layer + 0.875});
  }
  LastPrefill last;
  last.OnPrefillDone(result);
  const auto report = last.report();
  EXPECT_EQ(report->layer, 2);
  ASSERT_TRUE(report->layer_timeline.has_value());
  ASSERT_EQ(report->layer_timeline->spans.size(), 3u);
  EXPECT_EQ(report->layer_timeline->spans[0].end_seconds, 0.5);
  EXPECT_EQ(report->layer_timeline->spans[1].start_seconds, 0);
  EXPECT_EQ(report->layer_timeline->ranks, 4);
  EXPECT_EQ(report->layer_timeline->dropped_spans, 3);
  EXPECT_NE(PrefillReportSvg(*report).find("layer 2 as it was measured"), std::string::npos);
}

// The heights of an SVG's texts, of each section: it begins with a larger one.
std::vector<std::vector<double>> TextHeights(const std::string& svg) {
  std::vector<std::vector<double>> sections;
  const std::regex text(R"re(<text x="[^"]*" y="([^"]*)"([^>]*)>)re");
  for (std::sregex_iterator it(svg.begin(), svg.end(), text), end; it != end; ++it) {
    const bool title = (*it)[2].str().find("font-size=\"17\"") != std::string::npos;
    if (title || sections.empty()) sections.emplace_back();
    sections.back().push_back(std::stod((*it)[1]));
  }
  return sections;
}

TEST(LastPrefillTest, SectionsOfThePictureLieBelowEachOther) {
  FakeEngine engine;
  PrefillResult result = RunOnce(engine, 100);
  result.timeline.emplace(
      Timeline{.ranks = FakeEngine::kRanks,
               .spans = {{.what = "block", .layer = 0, .start_seconds = 0, .end_seconds = 1}}});
  LastPrefill last;
  last.OnPrefillDone(result);
  const std::string svg = PrefillReportSvg(*last.report());
  const auto sections = TextHeights(svg);
  ASSERT_EQ(sections.size(), 3u);
  double lowest = 0;
  for (const std::vector<double>& heights : sections) {
    EXPECT_LT(lowest + 10, heights.front());
    EXPECT_EQ(heights.front(), *std::min_element(heights.begin(), heights.end()));
    lowest = *std::max_element(heights.begin(), heights.end());
  }
  EXPECT_LT(lowest, std::stod(svg.substr(svg.find(" height=\"") + 9)));
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
