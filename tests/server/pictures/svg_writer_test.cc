// Shapes and the legend, attribute by attribute.
#include "server/pictures/svg_writer.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "server/pictures/legend.h"
#include "tests/server/pictures/svg_text.h"

namespace meshfill {
namespace {

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

}  // namespace
}  // namespace meshfill
