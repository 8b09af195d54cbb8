// Small timelines in full, shape by shape, alone and in the picture of a simulation.
#include "server/pictures/timeline_picture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>

#include "server/pictures/simulation_picture.h"
#include "server/pictures/svg_writer.h"
#include "tests/server/pictures/svg_text.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

Timeline ATimeline() {
  return {.ranks = 2,
          .spans = {{.rank = 0, .what = "block", .block = BlockIndex{1, 0}, .end_seconds = 0.002},
                    {.rank = 0,
                     .kind = SpanKind::kWait,
                     .what = "recv_kv",
                     .start_seconds = 0.002,
                     .end_seconds = 0.003},
                    {.rank = 0, .kind = SpanKind::kTransfer, .what = "recv_kv", .end_seconds = 0.003},
                    {.rank = 0,
                     .kind = SpanKind::kTransfer,
                     .what = "recv_q",
                     .start_seconds = 0.001,
                     .end_seconds = 0.0025},
                    {.rank = 1, .what = "mlp", .start_seconds = 0.001, .end_seconds = 0.004}}};
}

TEST(DrawTimeline, DrawsLanesBelowAnAxisBelowTheLegend) {
  SvgWriter svg;
  const double end = DrawTimeline(ATimeline(), 10, 20, 492, svg);
  EXPECT_EQ(Shapes(std::move(svg).Finish(512, end, "")),
            R"(<rect x="10.5" y="20.5" width="11" height="11" class="block"/>
<text x="28" y="30.5" font-size="12" class="muted">attention blocks</text>
<rect x="145.7" y="20.5" width="11" height="11" class="work"/>
<text x="163.2" y="30.5" font-size="12" class="muted">other work</text>
<rect x="243.7" y="20.5" width="11" height="11" class="wait"/>
<text x="261.2" y="30.5" font-size="12" class="muted">exposed wait</text>
<rect x="354.1" y="20.5" width="11" height="11" class="recv_q"/>
<text x="371.6" y="30.5" font-size="12" class="muted">Recv Q</text>
<rect x="427.3" y="20.5" width="11" height="11" class="recv_kv"/>
<text x="444.8" y="30.5" font-size="12" class="muted">Recv KV</text>
<line x1="102" y1="62" x2="102" y2="156" class="rule"/>
<text x="102" y="56" font-size="11" class="muted">0</text>
<line x1="152" y1="62" x2="152" y2="156" class="rule"/>
<text x="152" y="56" font-size="11" class="mid muted">500 µs</text>
<line x1="202" y1="62" x2="202" y2="156" class="rule"/>
<text x="202" y="56" font-size="11" class="mid muted">1 ms</text>
<line x1="252" y1="62" x2="252" y2="156" class="rule"/>
<text x="252" y="56" font-size="11" class="mid muted">1.5 ms</text>
<line x1="302" y1="62" x2="302" y2="156" class="rule"/>
<text x="302" y="56" font-size="11" class="mid muted">2 ms</text>
<line x1="352" y1="62" x2="352" y2="156" class="rule"/>
<text x="352" y="56" font-size="11" class="mid muted">2.5 ms</text>
<line x1="402" y1="62" x2="402" y2="156" class="rule"/>
<text x="402" y="56" font-size="11" class="mid muted">3 ms</text>
<line x1="452" y1="62" x2="452" y2="156" class="rule"/>
<text x="452" y="56" font-size="11" class="mid muted">3.5 ms</text>
<line x1="502" y1="62" x2="502" y2="156" class="rule"/>
<text x="502" y="56" font-size="11" class="mid muted">4 ms</text>
<g class="rank"><title>rank 0: 1 ms of wait, 25.0 % of the time shown</title>
<rect x="10" y="69" width="10" height="35.84" fill="#adcceb"/>
<text x="26" y="85.13" font-size="12">rank 0</text>
<rect x="102" y="68" width="199.2" height="23.46" class="block"/>
<text x="201.6" y="82.87" font-size="9.5" class="mid on-dark">(1,0)</text>
<rect x="302" y="68" width="99.2" height="23.46" class="wait"/>
<rect x="102" y="92.46" width="299.2" height="6.69" class="recv_kv"/>
<rect x="202" y="99.15" width="149.2" height="6.69" class="recv_q"/>
</g>
<g class="rank"><title>rank 1: 0 s of wait, 0.0 % of the time shown</title>
<rect x="10" y="113" width="10" height="35.84" fill="#e08598"/>
<text x="26" y="129.13" font-size="12">rank 1</text>
<rect x="202" y="112" width="299.2" height="23.46" class="work"/>
<text x="351.6" y="126.87" font-size="9.5" class="mid on-dark">mlp</text>
</g>
)");
}

// The steps of the axis: 1, 2 or 5 of a power of ten, ten at most.
TEST(DrawTimeline, DividesTheAxisIntoRoundParts) {
  for (const auto& [seconds, ticks, second] :
       {std::tuple(0.01, 11, ">1 ms<"), std::tuple(0.011, 6, ">2 ms<"), std::tuple(0.03, 7, ">5 ms<"),
        std::tuple(0.06, 7, ">10 ms<"), std::tuple(5.0, 11, ">500 ms<")}) {
    SvgWriter svg;
    Timeline timeline = ATimeline();
    DrawTimelineLanes(timeline, {.seconds = seconds}, 0, 0, 1000, svg);
    const std::string file = std::move(svg).Finish(1000, 100, "");
    EXPECT_EQ(Count(file, "class=\"rule\""), ticks) << seconds;
    EXPECT_EQ(Count(file, second), 1) << seconds;
  }
}

// Too narrow to see: those side by side are one, those apart or of another kind are not.
TEST(DrawTimeline, JoinsNarrowSpansOfOneKindSideBySide) {
  const auto drawn = [](const char* what, double begin) {
    SvgWriter svg;
    DrawTimelineLanes({.ranks = 1,
                       .spans = {{.what = "block", .end_seconds = 1e-6},
                                 {.what = what, .start_seconds = begin, .end_seconds = begin + 1e-6},
                                 {.what = "mlp", .start_seconds = 0.5, .end_seconds = 1}}},
                      {}, 0, 0, 1092, svg);
    return std::move(svg).Finish(1, 1, "");
  };
  EXPECT_EQ(Count(drawn("block", 1e-6), "class=\"block\""), 1);
  EXPECT_EQ(Count(drawn("block", 1e-2), "class=\"block\""), 2);
  EXPECT_EQ(Count(drawn("merge", 1e-6), "class=\"work\""), 2);
  EXPECT_THAT(drawn("block", 1e-6), HasSubstr("width=\"0.35\"")) << "wide enough to be seen";
}

// Rows become lower where there are many.
TEST(DrawTimeline, LowersRowsOfManyRanks) {
  for (const auto& [ranks, row] : {std::pair(1, 44), std::pair(16, 44), std::pair(17, 26), std::pair(32, 26),
                                   std::pair(33, 17), std::pair(64, 17)}) {
    SvgWriter svg;
    EXPECT_EQ(DrawTimelineLanes({.ranks = ranks}, {}, 0, 100, 500, svg), 100 + 24 + ranks * row) << ranks;
  }
}

TEST(SimulationSvg, PutsAllBelowEachOther) {
  EXPECT_EQ(
      Shapes(SimulationSvg("title", "cluster",
                           {{.name = "slow", .settings = "1x4", .timeline = ATimeline()},
                            {.name = "fast",
                             .settings = "2x2",
                             .timeline = {.ranks = 1, .spans = {{.what = "mlp", .end_seconds = 0.002}}}},
                            {.name = "late",
                             .settings = "4x1",
                             .timeline = {.ranks = 1, .spans = {{.what = "mlp", .end_seconds = 0.005}}}}})),
      R"(<text x="32" y="44" font-size="22" class="bold">title</text>
<text x="32" y="68" font-size="14" class="muted">cluster</text>
<text x="32" y="92" font-size="14" class="muted">Up to 4 ranks of each strategy, the one that ends last among them. The fastest strategy comes first.</text>
<text x="32" y="112" font-size="14" class="muted">Too slow to draw: late (5 ms).</text>
<rect x="32.5" y="132.5" width="11" height="11" class="block"/>
<text x="50" y="142.5" font-size="12" class="muted">attention blocks</text>
<rect x="167.7" y="132.5" width="11" height="11" class="work"/>
<text x="185.2" y="142.5" font-size="12" class="muted">other work</text>
<rect x="265.7" y="132.5" width="11" height="11" class="wait"/>
<text x="283.2" y="142.5" font-size="12" class="muted">exposed wait</text>
<rect x="376.1" y="132.5" width="11" height="11" class="recv_q"/>
<text x="393.6" y="142.5" font-size="12" class="muted">Recv Q</text>
<rect x="449.3" y="132.5" width="11" height="11" class="recv_kv"/>
<text x="466.8" y="142.5" font-size="12" class="muted">Recv KV</text>
<text x="32" y="178" font-size="15" class="bold">fast: 2 ms</text>
<text x="132" y="178" font-size="13" class="muted">2x2</text>
<line x1="124" y1="202" x2="124" y2="252" class="rule"/>
<text x="124" y="196" font-size="11" class="muted">0</text>
<line x1="259.5" y1="202" x2="259.5" y2="252" class="rule"/>
<text x="259.5" y="196" font-size="11" class="mid muted">500 µs</text>
<line x1="395" y1="202" x2="395" y2="252" class="rule"/>
<text x="395" y="196" font-size="11" class="mid muted">1 ms</text>
<line x1="530.5" y1="202" x2="530.5" y2="252" class="rule"/>
<text x="530.5" y="196" font-size="11" class="mid muted">1.5 ms</text>
<line x1="666" y1="202" x2="666" y2="252" class="rule"/>
<text x="666" y="196" font-size="11" class="mid muted">2 ms</text>
<line x1="801.5" y1="202" x2="801.5" y2="252" class="rule"/>
<text x="801.5" y="196" font-size="11" class="mid muted">2.5 ms</text>
<line x1="937" y1="202" x2="937" y2="252" class="rule"/>
<text x="937" y="196" font-size="11" class="mid muted">3 ms</text>
<line x1="1072.5" y1="202" x2="1072.5" y2="252" class="rule"/>
<text x="1072.5" y="196" font-size="11" class="mid muted">3.5 ms</text>
<line x1="1208" y1="202" x2="1208" y2="252" class="rule"/>
<text x="1208" y="196" font-size="11" class="mid muted">4 ms</text>
<g class="rank"><title>rank 0: 0 s of wait, 0.0 % of the time shown</title>
<rect x="32" y="209" width="10" height="35.84" fill="#adcceb"/>
<text x="48" y="225.13" font-size="12">rank 0</text>
<rect x="124" y="208" width="541.2" height="23.46" class="work"/>
<text x="394.6" y="222.87" font-size="9.5" class="mid on-dark">mlp</text>
</g>
<text x="32" y="278" font-size="15" class="bold">slow: 4 ms</text>
<text x="132" y="278" font-size="13" class="muted">1x4</text>
<line x1="124" y1="302" x2="124" y2="396" class="rule"/>
<text x="124" y="296" font-size="11" class="muted">0</text>
<line x1="259.5" y1="302" x2="259.5" y2="396" class="rule"/>
<text x="259.5" y="296" font-size="11" class="mid muted">500 µs</text>
<line x1="395" y1="302" x2="395" y2="396" class="rule"/>
<text x="395" y="296" font-size="11" class="mid muted">1 ms</text>
<line x1="530.5" y1="302" x2="530.5" y2="396" class="rule"/>
<text x="530.5" y="296" font-size="11" class="mid muted">1.5 ms</text>
<line x1="666" y1="302" x2="666" y2="396" class="rule"/>
<text x="666" y="296" font-size="11" class="mid muted">2 ms</text>
<line x1="801.5" y1="302" x2="801.5" y2="396" class="rule"/>
<text x="801.5" y="296" font-size="11" class="mid muted">2.5 ms</text>
<line x1="937" y1="302" x2="937" y2="396" class="rule"/>
<text x="937" y="296" font-size="11" class="mid muted">3 ms</text>
<line x1="1072.5" y1="302" x2="1072.5" y2="396" class="rule"/>
<text x="1072.5" y="296" font-size="11" class="mid muted">3.5 ms</text>
<line x1="1208" y1="302" x2="1208" y2="396" class="rule"/>
<text x="1208" y="296" font-size="11" class="mid muted">4 ms</text>
<g class="rank"><title>rank 0: 1 ms of wait, 25.0 % of the time shown</title>
<rect x="32" y="309" width="10" height="35.84" fill="#adcceb"/>
<text x="48" y="325.13" font-size="12">rank 0</text>
<rect x="124" y="308" width="541.2" height="23.46" class="block"/>
<text x="394.6" y="322.87" font-size="9.5" class="mid on-dark">(1,0)</text>
<rect x="666" y="308" width="270.2" height="23.46" class="wait"/>
<rect x="124" y="332.46" width="812.2" height="6.69" class="recv_kv"/>
<rect x="395" y="339.15" width="405.7" height="6.69" class="recv_q"/>
</g>
<g class="rank"><title>rank 1: 0 s of wait, 0.0 % of the time shown</title>
<rect x="32" y="353" width="10" height="35.84" fill="#e08598"/>
<text x="48" y="369.13" font-size="12">rank 1</text>
<rect x="395" y="352" width="812.2" height="23.46" class="work"/>
<text x="801.1" y="366.87" font-size="9.5" class="mid on-dark">mlp</text>
</g>
)");
}

}  // namespace
}  // namespace meshfill
