#include "server/api/end_line.h"

#include <string>

#include "gtest/gtest.h"

namespace meshfill {
namespace {

class EndLineTest : public testing::Test {
 protected:
  EndLineTest() {
    header_.set_request_id("r-1");
    header_.set_tenant("a b");
    header_.set_token_count(70'000);
    plan_.set_a(2);
    plan_.set_b(3);
    plan_.set_heads(4);
    plan_.set_ranks(24);
    *result_.mutable_plan() = plan_;
    result_.mutable_seconds()->set_queue(0.25);
    result_.mutable_seconds()->set_prefill(1.5);
  }

  std::string Line(const absl::Status& status, absl::string_view message = "") const {
    return EndLine({.header = header_,
                    .plan = plan_,
                    .result = result_,
                    .seconds = 2.0625,
                    .status = status,
                    .message = message});
  }

  v1::PrefillHeader header_;
  v1::PlanSummary plan_;
  v1::PrefillResult result_;
};

TEST_F(EndLineTest, NamesThePlanThatRan) {
  result_.mutable_plan()->set_a(6);
  result_.mutable_plan()->set_b(1);
  EXPECT_EQ(
      Line(absl::OkStatus()),
      "request id=\"r-1\" tenant=\"a b\" tokens=70000 plan=6x1 heads=4 ranks=24 seconds=2.062 queue=0.250 "
      "prefill=1.500 code=OK");
}

TEST_F(EndLineTest, TellsOfAttemptsAndPacksWhereThereWereSeveral) {
  result_.set_attempts(1);
  result_.set_pack_prompts(1);
  EXPECT_EQ(Line(absl::OkStatus()).find(" attempts="), std::string::npos);
  EXPECT_EQ(Line(absl::OkStatus()).find(" pack="), std::string::npos);
  result_.set_attempts(2);
  result_.set_pack_prompts(7);
  EXPECT_NE(Line(absl::OkStatus()).find(" prefill=1.500 attempts=2 pack=7 code=OK"), std::string::npos);
}

TEST_F(EndLineTest, AFailureHasItsMessageAndNoSecondsOfAResult) {
  EXPECT_EQ(Line(absl::UnavailableError("gone \"for good\"")),
            "request id=\"r-1\" tenant=\"a b\" tokens=70000 plan=2x3 heads=4 ranks=24 seconds=2.062 "
            "code=UNAVAILABLE message=\"gone \\\"for good\\\"\"");
  EXPECT_NE(Line(absl::InvalidArgumentError("token 7 is wrong"), "a token is wrong")
                .find(" message=\"a token is wrong\""),
            std::string::npos);
}

TEST_F(EndLineTest, ARefusedHeaderHasNoPlanAndIsCut) {
  plan_.Clear();
  header_.set_request_id(std::string(10'000, 'x'));
  EXPECT_EQ(Line(absl::InvalidArgumentError("no")), "request id=\"" + std::string(512, 'x') +
                                                        "\" tenant=\"a b\" tokens=70000 seconds=2.062 "
                                                        "code=INVALID_ARGUMENT message=\"no\"");
}

}  // namespace
}  // namespace meshfill
