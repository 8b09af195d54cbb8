// Small schedules in full, shape by shape.
#include "server/pictures/schedule_picture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>

#include "server/pictures/svg_writer.h"
#include "tests/server/pictures/svg_text.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

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

}  // namespace
}  // namespace meshfill
