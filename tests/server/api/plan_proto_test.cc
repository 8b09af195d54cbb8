// Plans on the wire: each field of a plan is in its own field of the message.
#include "server/api/plan_proto.h"

#include <cstdint>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

constexpr uint32_t kMost = std::numeric_limits<int16_t>::max();

template <typename Message>
void ExpectIs(const Message& got, const std::string& text) {
  Message expected;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &expected));
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(got, expected)) << got.DebugString();
}

Prediction SomePrediction(double scale) {
  return {.seconds = 1 * scale,
          .compute_seconds = 2 * scale,
          .comm_wait_seconds = 3 * scale,
          .comm_bytes = {{Traffic::kQ, 11},
                         {Traffic::kKv, 12},
                         {Traffic::kO, 13},
                         {Traffic::kAllToAll, 14},
                         {Traffic::kGather, 15}},
          .peak_bytes = 21,
          .weight_bytes = 22,
          .weight_seconds = 4 * scale};
}

std::string PredictionText(int scale) {
  return absl::StrCat("predicted { seconds: ", scale, " compute_seconds: ", 2 * scale,
                      " comm_wait_seconds: ", 3 * scale,
                      " comm_bytes { q: 11 kv: 12 o: 13 all_to_all: 14 gather: 15 }"
                      " peak_bytes: 21 weight_bytes: 22 weight_seconds: ",
                      4 * scale, " }");
}

Plan SomePlan() {
  Plan plan = {{.layout = *TokenLayout::Make(LayoutKind::kStriped, 12, 12 * 1024, 64),
                .heads = 2,
                .tile = {.a = 2, .b = 3},
                .kv_inner = 3,
                .partial_dtype = DType::kBf16,
                .exchange_tokens = 256}};
  plan.placement.name = "box 1x4x2";
  plan.schedule.steps = {
      {Traffic::kQ, {{0, 1}}}, {Traffic::kKv, {{1, 2}, {0, 2}}, /*spans=*/2}, {std::nullopt, {{1, 0}}}};
  plan.predicted = SomePrediction(1);
  return plan;
}

constexpr char kSomePlan[] = R"(ranks: 12 heads: 2 a: 2 b: 3 layout: LAYOUT_STRIPED stripe: 64
    partial_dtype: "bf16" placement: "box 1x4x2" exchange_tokens: 256 kv_inner: 3)";

TEST(PlanProtoTest, AReplyHasThePlanAndItsCandidates) {
  PlanChoice choice{.plan = SomePlan()};
  choice.weights.mode = WeightMode::kStreamed;
  PlanCandidate candidate = {{.layout = *TokenLayout::Make(LayoutKind::kZigzag, 10, 1000, 64),
                              .heads = 1,
                              .tile = {.a = 5, .b = 2},
                              .partial_dtype = DType::kF32}};
  candidate.predicted = SomePrediction(2);
  choice.candidates = {candidate};
  ExpectIs(ToProto(choice), absl::StrCat("plan { ", kSomePlan, " pieces: 1 } ", PredictionText(1), R"(
      steps { comm: "q" blocks { u: 0 v: 1 } }
      steps { comm: "kv" blocks { u: 1 v: 2 } blocks { u: 0 v: 2 } spans: 2 }
      steps { comm: "none" blocks { u: 1 v: 0 } }
      weights: "streamed"
      candidates { a: 5 b: 2 heads: 1 ranks: 10 layout: LAYOUT_ZIGZAG partial_dtype: "f32"
          placement: "row-first" )",
                                         PredictionText(2), "}"));
}

TEST(PlanProtoTest, ASummarySaysInHowManyPieces) {
  PlanChoice choice{.plan = SomePlan()};
  Plan first = SomePlan();
  first.layout = *TokenLayout::Make(LayoutKind::kStriped, 12, 5000, 64);
  choice.pieces = {first, SomePlan(), SomePlan()};
  ExpectIs(SummaryOf(choice), absl::StrCat(kSomePlan, " pieces: 3 piece_tokens: 5000"));
  choice.plan.exchange_tokens = 1024;  // all that a rank has
  EXPECT_EQ(SummaryOf(choice).exchange_tokens(), 0u);
}

TEST(PlanProtoTest, OptionsComeBackAsTheyWent) {
  for (const LayoutKind layout : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
    const PrefillOptions options = {.tile = Tile{2, 3}, .heads = 4, .layout = layout, .stripe = 5};
    const auto back = ToPrefillOptions(PlanOptionsOf(options));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->tile, options.tile);
    EXPECT_EQ(back->heads, options.heads);
    EXPECT_EQ(back->layout, options.layout);
    EXPECT_EQ(back->stripe, options.stripe);
  }
  const auto none = ToPrefillOptions(PlanOptionsOf({}));
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->tile.has_value() || none->heads.has_value() || none->layout.has_value() ||
               none->stripe.has_value());
}

TEST(PlanProtoTest, OptionsThatNoPlanCanHaveAreRefused) {
  const auto read = [](const std::string& text) {
    v1::PlanOptions options;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &options)) << text;
    return ToPrefillOptions(options).status();
  };
  EXPECT_TRUE(read(absl::StrCat("tile { a: ", kMost, " b: ", kMost, " } heads: ", kMost)).ok());
  for (const std::string& bad :
       {std::string("tile { a: 0 b: 1 }"), std::string("tile { a: 1 b: 0 }"),
        absl::StrCat("tile { a: ", kMost + 1, " b: 1 }"), absl::StrCat("tile { a: 1 b: ", kMost + 1, " }"),
        absl::StrCat("heads: ", kMost + 1), std::string("layout: 77")}) {
    EXPECT_EQ(read(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(PlanProtoTest, CountsThatNothingHoldsAreTooLong) {
  const FakeEngine engine;
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ToTokenCount(kLargest, engine).value(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(ToTokenCount(kLargest + 1, engine).status().code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace meshfill
