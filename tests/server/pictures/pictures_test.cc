// Pictures and traces of timelines that are made up: what is drawn of many ranks, of tiny and of parallel
// spans. The plan's picture is tested on the real binary (cli_pictures_test.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/pictures/duration.h"
#include "server/pictures/rank_colour.h"
#include "server/pictures/schedule_picture.h"
#include "server/pictures/simulation_picture.h"
#include "server/pictures/svg_writer.h"
#include "server/pictures/timeline_picture.h"
#include "server/pictures/trace_json.h"
#include "tests/server/pictures/svg_text.h"

namespace meshfill {
namespace {

std::string Drawn(const Timeline& timeline, const TimelineView& view = {}) {
  SvgWriter svg;
  const double end = DrawTimelineLanes(timeline, view, 0, 0, 1000, svg);
  return std::move(svg).Finish(1000, end, "a timeline");
}

// `blocks` blocks of a millisecond one after the other, beside a transfer, on each rank.
Timeline Blocks(int ranks, int blocks) {
  Timeline timeline{.ranks = ranks};
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < blocks; ++i) {
      timeline.spans.push_back({.rank = rank,
                                .what = "block",
                                .block = BlockIndex{i, 0},
                                .start_seconds = i * 1e-3,
                                .end_seconds = (i + 1) * 1e-3});
    }
    timeline.spans.push_back(
        {.rank = rank, .kind = SpanKind::kTransfer, .what = "recv_kv", .end_seconds = 1e-3});
  }
  return timeline;
}

TEST(SvgWriter, EscapesText) {
  SvgWriter svg;
  svg.Text(1, 2, "a < b & \"c\"");
  svg.OpenGroup("x", "<title>");
  svg.CloseGroup();
  const std::string file = std::move(svg).Finish(10, 20.5, "t & u");
  EXPECT_NE(file.find(">a &lt; b &amp; &quot;c&quot;</text>"), std::string::npos);
  EXPECT_NE(file.find("<title>&lt;title&gt;</title>"), std::string::npos);
  EXPECT_NE(file.find("<title>t &amp; u</title>"), std::string::npos);
  EXPECT_NE(file.find("viewBox=\"0 0 10 20.5\""), std::string::npos);
}

TEST(SvgWriter, BreaksAParagraphWithoutLosingAWord) {
  SvgWriter svg;
  const std::string text = "one two three four five six seven eight nine ten eleven twelve";
  const double end = svg.Paragraph(0, 10, 100, text);
  const std::string file = std::move(svg).Finish(100, end, "");
  const int lines = Count(file, "<text ");
  EXPECT_GT(lines, 3);
  EXPECT_EQ(end, 10 + 20 * lines);
  std::string joined;
  for (size_t at = file.find("<text "); at != std::string::npos; at = file.find("<text ", at + 1)) {
    const size_t begin = file.find('>', at) + 1;
    joined.append(file, begin, file.find('<', begin) - begin).append(" ");
  }
  EXPECT_EQ(joined, text + " ");
}

TEST(RankColour, IsItsOwnForEachOf64RanksAndLight) {
  std::set<std::string> colours;
  for (int rank = 0; rank < 64; ++rank) {
    const std::string colour = RankColour(rank);
    ASSERT_EQ(colour.size(), 7u);
    const int red = std::stoi(colour.substr(1, 2), nullptr, 16);
    const int green = std::stoi(colour.substr(3, 2), nullptr, 16);
    const int blue = std::stoi(colour.substr(5, 2), nullptr, 16);
    EXPECT_GT(0.2126 * red + 0.7152 * green + 0.0722 * blue, 100) << colour << ": dark text on it";
    colours.insert(colour);
  }
  EXPECT_EQ(colours.size(), 64u);
}

TEST(DurationText, HasThreeFigures) {
  EXPECT_EQ(DurationText(0), "0 s");
  EXPECT_EQ(DurationText(1.2345e-5), "12.3 µs");
  EXPECT_EQ(DurationText(4e-3), "4 ms");
  EXPECT_EQ(DurationText(0.8126), "813 ms");
  EXPECT_EQ(DurationText(27.25), "27.2 s");
  EXPECT_EQ(DurationText(5400), "5400 s");
}

TEST(DrawTimeline, DrawsEveryRankUpToTheViewsAndEvenlySpacedOnesBeyond) {
  EXPECT_EQ(Count(Drawn(Blocks(64, 2)), "<g class=\"rank\">"), 64);
  const std::string some = Drawn(Blocks(256, 2));
  EXPECT_EQ(Count(some, "<g class=\"rank\">"), 64);
  for (const char* rank : {">rank 0<", ">rank 4<", ">rank 252<"}) EXPECT_EQ(Count(some, rank), 1) << rank;
  EXPECT_EQ(Count(Drawn(Blocks(8, 2), {.most_ranks = 2}), "<g class=\"rank\">"), 2);
  EXPECT_EQ(Count(Drawn(Blocks(64, 999)), "<g class=\"rank\">"), 23);
}

TEST(DrawTimeline, LabelsBlocksThatHaveRoomAndJoinsThoseTooNarrowToSee) {
  const std::string wide = Drawn(Blocks(1, 10));
  EXPECT_EQ(Count(wide, "class=\"block\""), 10);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Count(wide, absl::StrCat(">(", i, ",0)<")), 1);
  EXPECT_EQ(Count(Drawn(Blocks(1, 100000)), "class=\"block\""), 1);
  EXPECT_EQ(Count(Drawn(Blocks(1, 300)), "class=\"block\""), 300);
  EXPECT_EQ(Count(Drawn(Blocks(1, 300)), ",0)<"), 0);
}

// Two transfers at once, on any two operations, share the comm lane's height.
TEST(DrawTimeline, DrawsTransfersThatAreUnderWayAtOnceBelowEachOther) {
  Timeline timeline = Blocks(1, 4);
  timeline.spans.push_back({.kind = SpanKind::kTransfer, .what = "recv_q", .end_seconds = 2e-3});
  const std::string drawn = Drawn(timeline);
  const auto y_of = [&drawn](const std::string& classes) {
    const size_t end = drawn.find("class=\"" + classes + "\"");
    const size_t y = drawn.rfind(" y=\"", end) + 4;
    return std::stod(drawn.substr(y));
  };
  EXPECT_NE(y_of("recv_q"), y_of("recv_kv"));
}

// As a ring of so many ranks has.
Schedule Ring(int ranks) {
  Schedule schedule{.tile = {.a = 1, .b = ranks}};
  for (int v = 0; v < ranks; ++v) {
    schedule.steps.push_back(
        {.comm = v + 1 < ranks ? std::optional(Traffic::kKv) : std::nullopt, .blocks = {BlockIndex{0, v}}});
  }
  return schedule;
}

std::string DrawnSchedule(const Schedule& schedule) {
  SvgWriter svg;
  const double end = DrawSchedule(schedule, 0, 0, 1176, svg);
  return std::move(svg).Finish(1240, end, "a schedule");
}

TEST(DrawSchedule, LeavesOutTheMiddleOfALongOneAndAllOfTooWideTiles) {
  const std::string whole = DrawnSchedule(Ring(64));
  EXPECT_EQ(Count(whole, "<g class=\"step\">"), 64);
  EXPECT_EQ(Count(whole, "left out"), 0);

  const std::string longer = DrawnSchedule(Ring(256));
  EXPECT_EQ(Count(longer, "<g class=\"step\">"), 62);
  EXPECT_EQ(Count(longer, "steps 31 to 224 are left out"), 1);
  EXPECT_EQ(Count(longer, ">step 30<") + Count(longer, ">step 225<") + Count(longer, ">step 255<"), 3);
  EXPECT_EQ(Count(longer, "<title>step 255: no message; blocks (0,255)</title>"), 1);

  const std::string wider = DrawnSchedule(Ring(600));
  EXPECT_EQ(Count(wider, "<g class=\"step\">"), 0);
  EXPECT_EQ(Count(wider, "steps 0 to 599 are left out"), 1);
}

TEST(DrawSchedule, NamesWhatIsReceivedAndSent) {
  const std::string drawn = DrawnSchedule({.tile = {.a = 2, .b = 2},
                                           .steps = {{.comm = Traffic::kQ, .blocks = {{0, 0}}},
                                                     {.comm = Traffic::kKv, .blocks = {{1, 0}}},
                                                     {.comm = std::nullopt, .blocks = {{1, 1}}},
                                                     {.comm = Traffic::kO, .blocks = {{0, 1}}}}});
  for (const char* title : {"step 0: Recv Q#1; blocks (0,0)", "step 1: Recv KV#1; blocks (1,0)",
                            "step 2: no message; blocks (1,1)", "step 3: Send O#1; blocks (0,1)"}) {
    EXPECT_EQ(Count(drawn, absl::StrCat("<title>", title, "</title>")), 1) << drawn;
  }
}

TEST(SimulationSvg, PutsTheFastestFirstAndNamesWhatIsTooSlowToDraw) {
  const std::string svg = SimulationSvg(
      "title", "a cluster",
      {{"slow", "", Blocks(8, 25)}, {"ring", "1x8", Blocks(8, 6)}, {"planned", "2x4", Blocks(8, 5)}});
  EXPECT_LT(svg.find(">planned: 5 ms<"), svg.find(">ring: 6 ms<"));
  EXPECT_NE(svg.find(">ring: 6 ms<"), std::string::npos);
  EXPECT_NE(svg.find("Too slow to draw: slow (25 ms)"), std::string::npos);
  EXPECT_EQ(Count(svg, "<g class=\"rank\">"), 2 * 4);
}

TEST(SimulationSvg, SettingsStandBesideTheLongestTitle) {
  const std::string name(40, 'm');
  const std::string svg =
      SimulationSvg("title", "a cluster", {{"ring", "1x8", Blocks(8, 5)}, {name, "2x4", Blocks(8, 6)}});
  for (const char* settings : {"1x8", "2x4"}) {
    const size_t text = svg.rfind("<text x=\"", svg.find(absl::StrCat(">", settings, "<")));
    ASSERT_NE(text, std::string::npos) << settings;
    EXPECT_GT(std::stod(svg.substr(text + 9)), 32 + 9.5 * (name.size() + 6)) << settings;  // ": 6 ms"
  }
}

// Whichever rank it is, and however many there are: the picture shows why the time is what it is.
TEST(SimulationSvg, DrawsTheRankThatEndsLast) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 50; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 100);
    Timeline timeline = Blocks(ranks, 5);
    const int straggler = static_cast<int>(random() % ranks);
    for (Span& span : timeline.spans) {
      if (span.rank == straggler) span.end_seconds *= 1.5;
    }
    const std::string svg = SimulationSvg("title", "a cluster", {{"ring", "", timeline}});
    EXPECT_EQ(Count(svg, absl::StrCat(">rank ", straggler, "<")), 1) << ranks;
    EXPECT_EQ(Count(svg, "<g class=\"rank\">"), std::min(ranks, 4));
    EXPECT_EQ(Count(svg, ">a cluster<"), 1);
  }
}

TEST(TraceJson, HasEverySpanWithItsNameLaneAndTimes) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> seconds(0, 100);
  Timeline timeline{.ranks = 3, .dropped_spans = 4};
  double now = 0;
  for (int i = 0; i < 200; ++i) {
    const double end = now + seconds(random);
    const SpanKind kind = static_cast<SpanKind>(random() % 3);
    timeline.spans.push_back({.rank = static_cast<int>(random() % 3),
                              .kind = kind,
                              .what = kind == SpanKind::kWork ? "block" : "send_o",
                              .blocks = kind == SpanKind::kWork ? 2 : 0,
                              .layer = static_cast<int>(random() % 4) - 1,
                              .start_seconds = now,
                              .end_seconds = end});
    now = end;
  }
  const nlohmann::json trace = nlohmann::json::parse(TraceJson(timeline));
  EXPECT_EQ(trace["otherData"]["dropped_spans"], 4);
  std::vector<nlohmann::json> events;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") events.push_back(event);
  }
  ASSERT_EQ(events.size(), timeline.spans.size());
  constexpr const char* kCategories[] = {"work", "wait", "transfer"};
  for (size_t i = 0; i < events.size(); ++i) {
    const Span& span = timeline.spans[i];
    EXPECT_EQ(events[i]["pid"], span.rank);
    EXPECT_EQ(events[i]["tid"], span.kind == SpanKind::kTransfer ? 1 : 0);
    EXPECT_EQ(events[i]["cat"], kCategories[static_cast<int>(span.kind)]);
    EXPECT_EQ(events[i]["name"], span.kind == SpanKind::kWork   ? "2 blocks"
                                 : span.kind == SpanKind::kWait ? "wait send_o"
                                                                : "send_o");
    EXPECT_NEAR(events[i]["ts"].get<double>(), span.start_seconds * 1e6, 1e-3);
    EXPECT_NEAR(events[i]["dur"].get<double>(), span.seconds() * 1e6, 2e-3);
    EXPECT_EQ(events[i].contains("args"), span.layer >= 0);
    if (span.layer >= 0) {
      EXPECT_EQ(events[i]["args"]["layer"], span.layer);
    }
  }
}

}  // namespace
}  // namespace meshfill
