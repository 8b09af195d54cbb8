// Small plans in full, shape by shape: what stands where, how large, and in which colour.
#include "server/pictures/plan_picture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "engine/plan/plan.h"
#include "server/pictures/assignment_picture.h"
#include "server/pictures/svg_writer.h"
#include "tests/server/pictures/svg_text.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::Not;

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
