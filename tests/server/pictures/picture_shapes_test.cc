// Small pictures in full, shape by shape: what stands where, how large, and in which colour.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/plan/plan.h"
#include "server/pictures/assignment_picture.h"
#include "server/pictures/legend.h"
#include "server/pictures/plan_picture.h"
#include "server/pictures/schedule_picture.h"
#include "server/pictures/simulation_picture.h"
#include "server/pictures/svg_writer.h"
#include "server/pictures/timeline_picture.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::Not;

// The file's shapes, without what each file has.
std::string Shapes(const std::string& file) {
  const size_t page = file.find("<rect class=\"page\""), begin = file.find('\n', page) + 1;
  return file.substr(begin, file.rfind("</svg>") - begin);
}

// Its texts, one a line.
std::string Texts(const std::string& file) {
  std::string texts;
  for (size_t at = file.find("<text "); at != std::string::npos; at = file.find("<text ", at + 1)) {
    const size_t begin = file.find('>', at) + 1;
    texts.append(file, begin, file.find('<', begin) - begin).append("\n");
  }
  return texts;
}

int Count(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) ++count;
  return count;
}

TEST(SvgWriter, WritesEveryAttribute) {
  SvgWriter svg;
  svg.Rect({1, 2.25, 3.126, 4}, "a b", "#123456");
  svg.Rect({10, 20, 30, 40}, "a");
  svg.Line(1, 2, 3, 4, "rule");
  svg.Text(1, 2, "x", "mid", 9.5);
  svg.Text(100, 2, "x");
  EXPECT_EQ(Shapes(std::move(svg).Finish(1, 1, "")),
            R"(<rect x="1" y="2.25" width="3.13" height="4" class="a b" fill="#123456"/>
<rect x="10" y="20" width="30" height="40" class="a"/>
<line x1="1" y1="2" x2="3" y2="4" class="rule"/>
<text x="1" y="2" font-size="9.5" class="mid">x</text>
<text x="100" y="2" font-size="13">x</text>
)");
}

// Words that just fit a line stay on it.
TEST(SvgWriter, BreaksLinesAtTheWidth) {
  SvgWriter svg;
  EXPECT_EQ(svg.Paragraph(5, 10, 6.6 * 8 + 0.1, "abc def ghijklmnop q", "muted"), 70);
  EXPECT_EQ(Shapes(std::move(svg).Finish(1, 1, "")),
            R"(<text x="5" y="10" font-size="13" class="muted">abc def</text>
<text x="5" y="30" font-size="13" class="muted">ghijklmnop</text>
<text x="5" y="50" font-size="13" class="muted">q</text>
)");
}

TEST(DrawLegend, GoesOnBelowWhereTheWidthEnds) {
  SvgWriter svg;
  EXPECT_EQ(
      DrawLegend({{"a", "first"}, {"b", "second"}, {"c", "third"}, {"d", "a text longer than the width"}}, 10,
                 100, 122.5, svg),
      160);
  EXPECT_EQ(Shapes(std::move(svg).Finish(1, 1, "")),
            R"(<rect x="10.5" y="100.5" width="11" height="11" class="a"/>
<text x="28" y="110.5" font-size="12" class="muted">first</text>
<rect x="77.5" y="100.5" width="11" height="11" class="b"/>
<text x="95" y="110.5" font-size="12" class="muted">second</text>
<rect x="10.5" y="120.5" width="11" height="11" class="c"/>
<text x="28" y="130.5" font-size="12" class="muted">third</text>
<rect x="10.5" y="140.5" width="11" height="11" class="d"/>
<text x="28" y="150.5" font-size="12" class="muted">a text longer than the width</text>
)");
}

Plan APlan(Tile tile) {
  Plan plan{{.layout = TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), 100, 16).value()}};
  plan.tile = tile;
  return plan;
}

std::string Assignment(const Plan& plan) {
  SvgWriter svg;
  const double end = DrawAssignment(plan, 10, 20, 500, svg);
  return std::move(svg).Finish(510, end, "");
}

TEST(DrawAssignment, HasATileForEachRankAndANumberForEachBlock) {
  Plan plan = APlan({2, 2});
  plan.heads = 3;
  EXPECT_EQ(Shapes(Assignment(plan)), R"(<g class="rank"><title>rank 0: Q 0, 1; KV 0, 2</title>
<rect x="54" y="64" width="88" height="88" class="tile" fill="#adcceb"/>
</g>
<g class="rank"><title>rank 3: Q 1, 0; KV 1, 3</title>
<rect x="142" y="64" width="88" height="88" class="tile" fill="#a785e0"/>
</g>
<g class="rank"><title>rank 6: Q 2, 3; KV 2, 0</title>
<rect x="54" y="152" width="88" height="88" class="tile" fill="#ebaddb"/>
</g>
<g class="rank"><title>rank 9: Q 3, 2; KV 3, 1</title>
<rect x="142" y="152" width="88" height="88" class="tile" fill="#e09085"/>
</g>
<line x1="98" y1="64" x2="98" y2="240" class="grid"/>
<line x1="54" y1="108" x2="230" y2="108" class="grid"/>
<line x1="142" y1="64" x2="142" y2="240" class="grid"/>
<line x1="54" y1="152" x2="230" y2="152" class="grid"/>
<line x1="186" y1="64" x2="186" y2="240" class="grid"/>
<line x1="54" y1="196" x2="230" y2="196" class="grid"/>
<text x="76" y="90.32" font-size="12" class="mid on-colour">0</text>
<text x="120" y="90.32" font-size="12" class="mid on-colour">0</text>
<text x="164" y="90.32" font-size="12" class="mid on-colour">3</text>
<text x="208" y="90.32" font-size="12" class="mid on-colour">3</text>
<text x="76" y="134.32" font-size="12" class="mid on-colour">0</text>
<text x="120" y="134.32" font-size="12" class="mid on-colour">0</text>
<text x="164" y="134.32" font-size="12" class="mid on-colour">3</text>
<text x="208" y="134.32" font-size="12" class="mid on-colour">3</text>
<text x="76" y="178.32" font-size="12" class="mid on-colour">6</text>
<text x="120" y="178.32" font-size="12" class="mid on-colour">6</text>
<text x="76" y="222.32" font-size="12" class="mid on-colour">6</text>
<text x="120" y="222.32" font-size="12" class="mid on-colour">6</text>
<rect x="142" y="152" width="88" height="88" class="chosen"/>
<text x="208" y="222.32" font-size="12" class="mid on-colour bold">(0,0)</text>
<text x="164" y="222.32" font-size="12" class="mid on-colour bold">(0,1)</text>
<text x="208" y="178.32" font-size="12" class="mid on-colour bold">(1,0)</text>
<text x="164" y="178.32" font-size="12" class="mid on-colour bold">(1,1)</text>
<text x="48" y="90.32" font-size="12" class="end muted">0</text>
<text x="76" y="58" font-size="12" class="mid muted">0</text>
<text x="48" y="134.32" font-size="12" class="end muted">1</text>
<text x="120" y="58" font-size="12" class="mid muted">2</text>
<text x="48" y="178.32" font-size="12" class="end bold">2</text>
<text x="164" y="58" font-size="12" class="mid bold">1</text>
<text x="48" y="222.32" font-size="12" class="end bold">3</text>
<text x="208" y="58" font-size="12" class="mid bold">3</text>
<text x="54" y="38" font-size="12" class="muted">KV chunks, by KV group →</text>
<text x="10" y="58" font-size="12" class="muted">Q ↓</text>
<text x="270" y="78" font-size="13">Every cell is a block: the attention</text>
<text x="270" y="98" font-size="13">of one Q chunk with one KV chunk.</text>
<text x="270" y="118" font-size="13">Its number and colour say which rank</text>
<text x="270" y="138" font-size="13">computes it. Each rank has a tile of</text>
<text x="270" y="158" font-size="13">2 × 2 blocks.</text>
<text x="270" y="186" font-size="13" class="bold">Rank 9 (outlined)</text>
<text x="270" y="214" font-size="13">holds Q 3 and KV 3 from the start:</text>
<text x="270" y="234" font-size="13">block (0,0).</text>
<text x="270" y="262" font-size="13">Its rows Q#0 … Q#1 are Q 3, 2: all</text>
<text x="270" y="282" font-size="13">but its own come from rank 6, one</text>
<text x="270" y="302" font-size="13">after the other, and one partial</text>
<text x="270" y="322" font-size="13">output goes back around the same</text>
<text x="270" y="342" font-size="13">ring.</text>
<text x="270" y="370" font-size="13">Its columns KV#0 … KV#1 are KV 3,</text>
<text x="270" y="390" font-size="13">1: all but its own come from rank 3.</text>
<text x="270" y="418" font-size="13" class="muted">Received in each layer: 1 Q, 1 KV, 1</text>
<text x="270" y="438" font-size="13" class="muted">partial outputs. A ring of 4</text>
<text x="270" y="458" font-size="13" class="muted">receives 3 KV.</text>
<text x="270" y="486" font-size="13" class="muted">There are 3 meshes like this one,</text>
<text x="270" y="506" font-size="13" class="muted">each with its share of the heads.</text>
<text x="270" y="526" font-size="13" class="muted">Chunk i is of the 3 ranks 3i … 3i</text>
<text x="270" y="546" font-size="13" class="muted">+ 2, which trade tokens for heads</text>
<text x="270" y="566" font-size="13" class="muted">before and back after; the k-th of</text>
<text x="270" y="586" font-size="13" class="muted">them is in mesh k. Numbers are those</text>
<text x="270" y="606" font-size="13" class="muted">of mesh 0.</text>
)");
}

TEST(DrawAssignment, ExplainsOneRanksTile) {
  const auto words = [](const Plan& plan) {
    const std::string texts = Texts(Assignment(plan));
    return texts.substr(texts.find("Every cell"));
  };
  EXPECT_EQ(words(APlan({1, 1})), R"(Every cell is a block: the attention of one Q chunk with
one KV chunk. Its number and colour say which rank
computes it. Each rank has a tile of 1 × 1 blocks.
Rank 0 (outlined)
holds Q 0 and KV 0 from the start: block (0,0).
)");
  Plan plan = APlan({3, 4});
  plan.kv_inner = 2;
  EXPECT_EQ(
      words(plan),
      R"(Every cell is a block: the attention of one Q chunk with one KV chunk. Its number and colour say which rank computes it. Each rank has a tile of 3 × 4 blocks.
Rank 7 (outlined)
holds Q 7 and KV 7 from the start: block (0,0).
Its rows Q#0 … Q#2 are Q 7, 8, 6: all but its own come from rank 8, one after the other, and 2 partial outputs go back around the same ring.
Its columns KV#0 … KV#3 are KV 7, 10, 1, 4: all but its own come from rank 10, and the first of each 2 from rank 1.
Received in each layer: 2 Q, 3 KV, 2 partial outputs. A ring of 12 receives 11 KV.
)");
}

// Blocks become too small for indices, then for numbers, then for lines between them.
TEST(DrawAssignment, LeavesOutWhatIsTooSmall) {
  const std::string numbered = Assignment(APlan({4, 5}));
  EXPECT_THAT(numbered, Not(HasSubstr(">(0,0)<")));
  EXPECT_EQ(Count(numbered, "font-size=\"12\" class=\"mid on-colour\""), 20 * 20);
  EXPECT_EQ(Count(numbered, "class=\"grid\""), 2 * 19);
  EXPECT_EQ(Count(Assignment(APlan({4, 7})), "font-size=\"18\" class=\"mid on-colour\""), 28)
      << "one for each tile";
  const std::string many = Assignment(APlan({25, 20}));
  EXPECT_EQ(Count(many, "class=\"grid\""), 0);
  EXPECT_THAT(many, HasSubstr("rank 1: Q 1, 2, 3 … 0 (25); KV 1, 26, 51, "));
  EXPECT_EQ(Count(many, "class=\"end muted\"") + Count(many, "class=\"end bold\""), 72)
      << "every seventh row";
}

std::string Drawn(const Schedule& schedule) {
  SvgWriter svg;
  const double end = DrawSchedule(schedule, 10, 20, 1176, svg);
  return Shapes(std::move(svg).Finish(1240, end, ""));
}

TEST(DrawSchedule, ShowsWhatIsHereArrivesAndLeaves) {
  EXPECT_EQ(Drawn({.tile = {.a = 2, .b = 2},
                   .steps = {{.comm = Traffic::kQ, .blocks = {{0, 0}}},
                             {.comm = Traffic::kKv, .blocks = {{1, 0}}},
                             {.comm = Traffic::kO, .blocks = {{0, 1}, {1, 1}}}}}),
            R"(<rect x="10.5" y="20.5" width="11" height="11" class="recv_q"/>
<text x="28" y="30.5" font-size="12" class="muted">Q chunk here</text>
<rect x="120.9" y="20.5" width="11" height="11" class="recv_q arriving"/>
<text x="138.4" y="30.5" font-size="12" class="muted">arriving</text>
<rect x="206.5" y="20.5" width="11" height="11" class="recv_kv"/>
<text x="224" y="30.5" font-size="12" class="muted">KV chunk here</text>
<rect x="323.1" y="20.5" width="11" height="11" class="recv_kv arriving"/>
<text x="340.6" y="30.5" font-size="12" class="muted">arriving</text>
<rect x="408.7" y="20.5" width="11" height="11" class="block"/>
<text x="426.2" y="30.5" font-size="12" class="muted">computed in this step</text>
<rect x="574.9" y="20.5" width="11" height="11" class="done"/>
<text x="592.4" y="30.5" font-size="12" class="muted">done</text>
<rect x="635.7" y="20.5" width="11" height="11" class="ready"/>
<text x="653.2" y="30.5" font-size="12" class="muted">could be computed</text>
<rect x="777.1" y="20.5" width="11" height="11" class="absent"/>
<text x="794.6" y="30.5" font-size="12" class="muted">chunks missing</text>
<rect x="899.9" y="20.5" width="11" height="11" class="send_o"/>
<text x="917.4" y="30.5" font-size="12" class="muted">partial output leaving</text>
<g class="step"><title>step 0: Recv Q#1; blocks (0,0)</title>
<text x="10" y="58" font-size="11" class="muted">step 0</text>
<rect x="10" y="63" width="92" height="18" class="recv_q"/>
<text x="56" y="76" font-size="11" class="mid bold on-colour">Recv Q#1</text>
<rect x="20.5" y="102.5" width="19" height="19" class="block"/>
<rect x="40.5" y="102.5" width="19" height="19" class="absent"/>
<rect x="20.5" y="122.5" width="19" height="19" class="absent"/>
<rect x="40.5" y="122.5" width="19" height="19" class="absent"/>
<rect x="10" y="102.5" width="6" height="19" class="recv_q"/>
<rect x="20.5" y="92" width="19" height="6" class="recv_kv"/>
<rect x="10" y="122.5" width="6" height="19" class="recv_q arriving"/>
<text x="10" y="157" font-size="11">(0,0)</text>
</g>
<g class="step"><title>step 1: Recv KV#1; blocks (1,0)</title>
<text x="120" y="58" font-size="11" class="muted">step 1</text>
<rect x="120" y="63" width="92" height="18" class="recv_kv"/>
<text x="166" y="76" font-size="11" class="mid bold on-colour">Recv KV#1</text>
<rect x="130.5" y="102.5" width="19" height="19" class="done"/>
<rect x="150.5" y="102.5" width="19" height="19" class="absent"/>
<rect x="130.5" y="122.5" width="19" height="19" class="block"/>
<rect x="150.5" y="122.5" width="19" height="19" class="absent"/>
<rect x="120" y="102.5" width="6" height="19" class="recv_q"/>
<rect x="120" y="122.5" width="6" height="19" class="recv_q"/>
<rect x="130.5" y="92" width="19" height="6" class="recv_kv"/>
<rect x="150.5" y="92" width="19" height="6" class="recv_kv arriving"/>
<text x="120" y="157" font-size="11">(1,0)</text>
</g>
<g class="step"><title>step 2: Send O#1; blocks (0,1) (1,1)</title>
<text x="230" y="58" font-size="11" class="muted">step 2</text>
<rect x="230" y="63" width="92" height="18" class="send_o"/>
<text x="276" y="76" font-size="11" class="mid bold on-colour">Send O#1</text>
<rect x="240.5" y="102.5" width="19" height="19" class="done"/>
<rect x="260.5" y="102.5" width="19" height="19" class="block"/>
<rect x="240.5" y="122.5" width="19" height="19" class="done"/>
<rect x="260.5" y="122.5" width="19" height="19" class="block"/>
<rect x="230" y="102.5" width="6" height="19" class="recv_q"/>
<rect x="230" y="122.5" width="6" height="19" class="recv_q"/>
<rect x="240.5" y="92" width="19" height="6" class="recv_kv"/>
<rect x="260.5" y="92" width="19" height="6" class="recv_kv"/>
<rect x="284" y="122.5" width="6" height="19" class="send_o"/>
<text x="230" y="157" font-size="11">(0,1) (1,1)</text>
</g>
)");
}

// Communications that go on beside others.
TEST(DrawSchedule, SaysUntilWhenACommunicationLasts) {
  const std::string drawn = Drawn({.tile = {.a = 1, .b = 4},
                                   .steps = {{.comm = Traffic::kKv, .blocks = {{0, 0}}, .spans = 2},
                                             {.comm = std::nullopt, .blocks = {}},
                                             {.comm = std::nullopt, .blocks = {{0, 1}}}},
                                   .kv_inner = 2});
  EXPECT_EQ(Texts(drawn), R"(Q chunk here
arriving
KV chunk here
arriving
computed in this step
done
could be computed
chunks missing
partial output leaving
step 0
Recv KV#2 …
(0,0)
step 1
… goes on

step 2
no message
(0,1)
)");
  EXPECT_EQ(Count(drawn, "recv_kv arriving"), 1 + 2) << "the legend, and two steps";
  EXPECT_EQ(Count(drawn, "class=\"ready\""), 1 + 1) << "the legend, and a block of the chunk that came";
}

// As many whole lines of cards as there is room for.
TEST(DrawSchedule, BreaksLinesOfCards) {
  Schedule schedule{.tile = {.a = 1, .b = 12}};
  for (int v = 0; v < 12; ++v) {
    schedule.steps.push_back(
        {.comm = v + 1 < 12 ? std::optional(Traffic::kKv) : std::nullopt, .blocks = {{0, v}}});
  }
  SvgWriter svg;
  EXPECT_EQ(DrawSchedule(schedule, 10, 20, 1176, svg), 46 + 2 * 110) << "below the legend, two lines";
  const std::string drawn = std::move(svg).Finish(1240, 1000, "");
  EXPECT_THAT(drawn, HasSubstr(R"(<text x="948" y="58" font-size="11" class="muted">step 7</text>)"));
  EXPECT_THAT(drawn, HasSubstr(R"(<text x="10" y="168" font-size="11" class="muted">step 8</text>)"));
}

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

TEST(PlanSvg, SaysWhatThePlanIsAndWhatItTakes) {
  Plan plan = APlan({1, 1});
  plan.schedule = {.tile = {1, 1}, .steps = {{.blocks = {{0, 0}}}}};
  plan.predicted = {.seconds = 2, .comm_wait_seconds = 0.5};
  const Timeline layer = {
      .ranks = 2,
      .spans = {{.what = "block", .block = BlockIndex{0, 0}, .end_seconds = 0.002},
                {.kind = SpanKind::kWait, .what = "recv_kv", .start_seconds = 0.002, .end_seconds = 0.003},
                {.rank = 1, .kind = SpanKind::kWait, .what = "recv_kv", .end_seconds = 0.001}}};
  EXPECT_EQ(Shapes(PlanSvg(plan, layer)),
            R"(<text x="32" y="44" font-size="22" class="bold">Mesh-Attention on 1 rank: tile 1 × 1</text>
<text x="32" y="68" font-size="14" class="muted">100 tokens, striped in stripes of 16, partial outputs in f32; predicted 2 s for all layers, of it 500 ms exposed wait</text>
<text x="32" y="116" font-size="17" class="bold">Who: the assignment matrix</text>
<g class="rank"><title>rank 0: Q 0; KV 0</title>
<rect x="76" y="174" width="44" height="44" class="tile" fill="#adcceb"/>
</g>
<rect x="76" y="174" width="44" height="44" class="chosen"/>
<text x="98" y="200.32" font-size="12" class="mid on-colour bold">(0,0)</text>
<text x="70" y="200.32" font-size="12" class="end bold">0</text>
<text x="98" y="168" font-size="12" class="mid bold">0</text>
<text x="76" y="148" font-size="12" class="muted">KV chunks, by KV group →</text>
<text x="32" y="168" font-size="12" class="muted">Q ↓</text>
<text x="160" y="188" font-size="13">Every cell is a block: the attention of one Q chunk with one KV chunk. Its number and colour say which rank computes it. Each rank has a tile of 1 × 1</text>
<text x="160" y="208" font-size="13">blocks.</text>
<text x="160" y="236" font-size="13" class="bold">Rank 0 (outlined)</text>
<text x="160" y="264" font-size="13">holds Q 0 and KV 0 from the start: block (0,0).</text>
<text x="32" y="340" font-size="17" class="bold">In which order: the schedule, the same on every rank, in its own local indices (Q#u, KV#v)</text>
<rect x="32.5" y="354.5" width="11" height="11" class="recv_q"/>
<text x="50" y="364.5" font-size="12" class="muted">Q chunk here</text>
<rect x="142.9" y="354.5" width="11" height="11" class="recv_q arriving"/>
<text x="160.4" y="364.5" font-size="12" class="muted">arriving</text>
<rect x="228.5" y="354.5" width="11" height="11" class="recv_kv"/>
<text x="246" y="364.5" font-size="12" class="muted">KV chunk here</text>
<rect x="345.1" y="354.5" width="11" height="11" class="recv_kv arriving"/>
<text x="362.6" y="364.5" font-size="12" class="muted">arriving</text>
<rect x="430.7" y="354.5" width="11" height="11" class="block"/>
<text x="448.2" y="364.5" font-size="12" class="muted">computed in this step</text>
<rect x="596.9" y="354.5" width="11" height="11" class="done"/>
<text x="614.4" y="364.5" font-size="12" class="muted">done</text>
<rect x="657.7" y="354.5" width="11" height="11" class="ready"/>
<text x="675.2" y="364.5" font-size="12" class="muted">could be computed</text>
<rect x="799.1" y="354.5" width="11" height="11" class="absent"/>
<text x="816.6" y="364.5" font-size="12" class="muted">chunks missing</text>
<rect x="921.9" y="354.5" width="11" height="11" class="send_o"/>
<text x="939.4" y="364.5" font-size="12" class="muted">partial output leaving</text>
<g class="step"><title>step 0: no message; blocks (0,0)</title>
<text x="32" y="392" font-size="11" class="muted">step 0</text>
<rect x="32" y="397" width="92" height="18" class="track"/>
<text x="78" y="410" font-size="11" class="mid muted">no message</text>
<rect x="42.5" y="436.5" width="19" height="19" class="block"/>
<rect x="32" y="436.5" width="6" height="19" class="recv_q"/>
<rect x="42.5" y="426" width="19" height="6" class="recv_kv"/>
<text x="32" y="471" font-size="11">(0,0)</text>
</g>
<text x="32" y="538" font-size="17" class="bold">How long: the attention of one layer, predicted 3 ms, of it 1 ms exposed wait</text>
<rect x="32.5" y="552.5" width="11" height="11" class="block"/>
<text x="50" y="562.5" font-size="12" class="muted">attention blocks</text>
<rect x="167.7" y="552.5" width="11" height="11" class="wait"/>
<text x="185.2" y="562.5" font-size="12" class="muted">exposed wait</text>
<line x1="124" y1="594" x2="124" y2="688" class="rule"/>
<text x="124" y="588" font-size="11" class="muted">0</text>
<line x1="304.67" y1="594" x2="304.67" y2="688" class="rule"/>
<text x="304.67" y="588" font-size="11" class="mid muted">500 µs</text>
<line x1="485.33" y1="594" x2="485.33" y2="688" class="rule"/>
<text x="485.33" y="588" font-size="11" class="mid muted">1 ms</text>
<line x1="666" y1="594" x2="666" y2="688" class="rule"/>
<text x="666" y="588" font-size="11" class="mid muted">1.5 ms</text>
<line x1="846.67" y1="594" x2="846.67" y2="688" class="rule"/>
<text x="846.67" y="588" font-size="11" class="mid muted">2 ms</text>
<line x1="1027.33" y1="594" x2="1027.33" y2="688" class="rule"/>
<text x="1027.33" y="588" font-size="11" class="mid muted">2.5 ms</text>
<line x1="1208" y1="594" x2="1208" y2="688" class="rule"/>
<text x="1208" y="588" font-size="11" class="mid muted">3 ms</text>
<g class="rank"><title>rank 0: 1 ms of wait, 33.3 % of the time shown</title>
<rect x="32" y="601" width="10" height="35.84" fill="#adcceb"/>
<text x="48" y="617.13" font-size="12">rank 0</text>
<rect x="124" y="600" width="721.87" height="23.46" class="block"/>
<text x="484.93" y="614.87" font-size="9.5" class="mid on-dark">(0,0)</text>
<rect x="846.67" y="600" width="360.53" height="23.46" class="wait"/>
</g>
<g class="rank"><title>rank 1: 1 ms of wait, 33.3 % of the time shown</title>
<rect x="32" y="645" width="10" height="35.84" fill="#e08598"/>
<text x="48" y="661.13" font-size="12">rank 1</text>
<rect x="124" y="644" width="360.53" height="23.46" class="wait"/>
</g>
)");
  plan.layout = TokenLayout::Make(LayoutKind::kStriped, 12, 100, 16).value();
  plan.tile = {2, 3};
  plan.heads = 2;
  plan.placement.name = "box 1x2x3";
  const std::string other = PlanSvg(plan, layer);
  EXPECT_THAT(
      other,
      HasSubstr("<title>Mesh-Attention on 12 ranks: 2 meshes with a share of the heads each, tile 2 × 3<"));
  EXPECT_THAT(other,
              HasSubstr(", partial outputs in f32, box 1x2x3 on a host; predicted 2 s for all layers"));
}

}  // namespace
}  // namespace meshfill
