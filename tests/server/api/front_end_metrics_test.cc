// What the front-end counts and logs of requests: of several, and of each kind of end.
#include <string>
#include <vector>

#include "server/observe/log.h"
#include "server/queue/refusal.h"
#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

class FrontEndMetricsTest : public FrontEndFixture {
 protected:
  double Requests(const std::string& code) const {
    return Metric(absl::StrCat("meshfill_requests_total{code=\"", code, "\"}"));
  }
  double Refused(const std::string& reason) const {
    return Metric(absl::StrCat("meshfill_requests_refused_total{reason=\"", reason, "\"}"));
  }
  double AllRefused() const {
    double refused = 0;
    for (int reason = 0; reason <= static_cast<int>(Refusal::kOther); ++reason) {
      refused += Refused(RefusalName(static_cast<Refusal>(reason)));
    }
    return refused;
  }
};

TEST_F(FrontEndMetricsTest, EachRequestEndsOnceAndOnlyAnswersHaveAFirstToken) {
  StartServer();
  EXPECT_TRUE(Prefill(Header(3), {1, 2, 3}).status.ok());
  engine_->FailNext(absl::InternalError("NaN in the logits"));
  EXPECT_EQ(Prefill(Header(4), {1, 2, 3, 4}).status.code(), absl::StatusCode::kInternal);
  engine_->FailNext(WithRefusal(absl::ResourceExhaustedError("no room for K and V"), Refusal::kKvRoom));
  EXPECT_EQ(Prefill(Header(3), {1, 2, 3}).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(AllRefused(), 0) << "what failed had its place";
  EXPECT_TRUE(Prefill(Header(5), {1, 2, 3, 4, 5}).status.ok());

  v1::PrefillHeader unknown = Header(1);
  unknown.set_model("another");
  EXPECT_EQ(Prefill(unknown, {1}).status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Prefill(Header(2), {1}).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Refused("unknown_model"), 1);
  EXPECT_EQ(Refused("invalid"), 1);
  EXPECT_EQ(AllRefused(), 2);

  {
    Call gives_up(*stub_);
    gives_up.Send(Header(9)).Send({1});
    ASSERT_TRUE(Eventually([&] { return GetPool().queued_requests() == 1; }));
    gives_up.context().TryCancel();
    EXPECT_EQ(gives_up.Finish().status.code(), absl::StatusCode::kCancelled);
  }
  ASSERT_TRUE(Eventually([&] { return Requests("CANCELLED") == 1; }));
  EXPECT_EQ(AllRefused(), 2) << "who gives up is not refused";

  EXPECT_EQ(Requests("OK"), 2);
  EXPECT_EQ(Requests("INTERNAL"), 1);
  EXPECT_EQ(Requests("NOT_FOUND"), 1);
  EXPECT_EQ(Requests("INVALID_ARGUMENT"), 1);
  EXPECT_EQ(Requests("DEADLINE_EXCEEDED"), 0);
  EXPECT_EQ(Metric("meshfill_ttft_seconds_count"), 2);
  EXPECT_EQ(Metric("meshfill_upload_seconds_count"), 2);
  EXPECT_EQ(Metric("meshfill_slowdown_count{up_to=\"8192\"}"), 2);
  EXPECT_EQ(Metric("meshfill_request_prompt_tokens_sum"), 8);
  EXPECT_EQ(Metric("meshfill_queue_wait_seconds_count"), 4) << "of each prefill that began";
  EXPECT_EQ(Metric("meshfill_prefill_seconds_count"), 2);
  EXPECT_EQ(Metric("meshfill_prompt_tokens_total"), 8);
  EXPECT_EQ(Metric("meshfill_queue_requests"), 0);
}

// It was accepted, and is refused after all: with its reason, and when to come again.
TEST_F(FrontEndMetricsTest, AnAcceptedPromptThatLosesItsPlaceIsRefused) {
  StartServer({"queue.max_requests=2"});
  engine_->PredictSeconds(300);
  engine_->Hold(0);
  const auto of = [](const std::string& tenant) {
    v1::PrefillHeader header = Header(1);
    header.set_tenant(tenant);
    return header;
  };
  constexpr absl::Duration kLong = absl::Hours(1);  // the predictions take a third of that
  Call runs(*stub_, kLong), waits(*stub_, kLong), newest(*stub_, kLong), other(*stub_, kLong);
  runs.Send(of("busy")).Send({1}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  for (Call* call : {&waits, &newest}) {
    call->Send(of("busy")).Send({1}).HalfClose();
    EXPECT_TRUE(call->ReadEvent().has_accepted());
  }
  other.Send(of("other")).Send({1}).HalfClose();
  const Reply lost = newest.Finish();
  EXPECT_EQ(lost.status.code(), absl::StatusCode::kResourceExhausted) << lost.status;
  EXPECT_GT(RetryAfter(lost.status).value_or(absl::ZeroDuration()), absl::Seconds(20)) << lost.status;
  EXPECT_EQ(Refused("tenant_share"), 1);
  EXPECT_EQ(AllRefused(), 1);
  engine_->Release();
  for (Call* call : {&runs, &waits, &other}) EXPECT_TRUE(call->Finish().status.ok());
}

// Of one request the figures are parts of each other: its time to first token is its upload and what its
// slowdown is of.
TEST_F(FrontEndMetricsTest, ASlowUploadIsInTheTimeToFirstTokenAndNotInTheSlowdown) {
  StartServer();
  engine_->PredictSeconds(0.5);
  Call call(*stub_);
  call.Send(Header(3)).Send({1});
  ASSERT_TRUE(Eventually([&] {
    const v1::PoolStatus pool = GetPool();
    return pool.requests_size() == 1 && pool.requests(0).elapsed_seconds() > 0.05;
  }));
  const Reply reply = call.Send({2, 3}).HalfClose().Finish();
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  const double ttft = Metric("meshfill_ttft_seconds_sum"), upload = Metric("meshfill_upload_seconds_sum");
  EXPECT_GT(upload, 0.05);
  EXPECT_GT(ttft, upload);
  EXPECT_NEAR(ttft - upload, Metric("meshfill_slowdown_sum{up_to=\"8192\"}") * 0.5, 1e-3 * ttft);
  EXPECT_DOUBLE_EQ(reply.result->seconds().prefill(), Metric("meshfill_prefill_seconds_sum"));
}

// The last of three prompts runs beside another one, or shares its pass, and is predicted 120 s there.
TEST_F(FrontEndMetricsTest, TheSlowdownIsOverThePredictionForThePromptAlone) {
  for (const bool pack : {false, true}) {
    StartServer({}, /*open=*/false, /*layers=*/4, /*capacity=*/pack ? 1 : 3);
    engine_->PredictSeconds(100);
    if (pack) {
      engine_->SharePasses({.ranks = 4, .rank_tokens = 1024}, {.least_seconds = 120});
    } else {
      engine_->OfferSubmeshes({.submeshes = 2, .seconds = 120});
    }
    front_end_->Open(std::move(engine_owner_));
    engine_->Hold(0);
    const auto ttft = [&] {
      return Metric("meshfill_ttft_seconds_sum") - Metric("meshfill_upload_seconds_sum");
    };
    const auto slowdown = [&] { return Metric("meshfill_slowdown_sum{up_to=\"8192\"}"); };
    const double ttft_before = ttft(), slowdown_before = slowdown();
    constexpr absl::Duration kLong = absl::Minutes(20);  // the predictions leave that much
    Call runs(*stub_, kLong), second(*stub_, kLong), third(*stub_, kLong);
    runs.Send(Header(1)).Send({1}).HalfClose();
    ASSERT_TRUE(engine_->WaitForBegun(1));
    for (Call* call : {&second, &third}) {
      call->Send(Header(1)).Send({2}).HalfClose();
      const v1::Accepted accepted = call->ReadEvent().accepted();
      EXPECT_NEAR(accepted.predicted_seconds(), call == &third ? 120 : 100, 1e-6);
    }
    engine_->Release();
    for (Call* call : {&runs, &second, &third}) EXPECT_TRUE(call->Finish().status.ok());
    EXPECT_NEAR((slowdown() - slowdown_before) * 100, ttft() - ttft_before, 1e-6 * ttft()) << pack;
    front_end_.reset();
  }
}

TEST_F(FrontEndMetricsTest, AcceptedSaysTheWaitAndTheResultWhatItWas) {
  StartServer();
  engine_->Hold(0);
  engine_->PredictSeconds(100);
  Call first(*stub_, absl::Minutes(10)), second(*stub_, absl::Minutes(10));
  first.Send(Header(1)).Send({1}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  second.Send(Header(1)).Send({2}).HalfClose();
  const v1::Accepted accepted = second.ReadEvent().accepted();
  EXPECT_EQ(accepted.queue_position(), 1u);
  EXPECT_GT(accepted.predicted_queue_seconds(), 50);
  EXPECT_LE(accepted.predicted_queue_seconds(), 100);
  engine_->Release();
  EXPECT_TRUE(first.Finish().status.ok());
  const Reply reply = second.Finish();
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_GT(reply.result->seconds().queue(), 0);
}

// What is cached is known when the prompt is complete: from then on others wait less.
TEST_F(FrontEndMetricsTest, ACachedPrefixShortensTheTurn) {
  StartServer();
  engine_->Hold(0);
  engine_->PredictSeconds(100);
  engine_->Cache(64, 5);
  const std::vector<uint32_t> ids(100, 1);
  constexpr absl::Duration kLong = absl::Minutes(10);  // the predictions leave that much
  Call runs(*stub_, kLong), waits(*stub_, kLong), whole(*stub_, kLong);
  v1::PrefillHeader header = Header(100);
  header.mutable_kv()->set_ignore_cache(true);
  runs.Send(header).Send(ids).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  waits.Send(Header(100)).Send(ids).HalfClose();
  EXPECT_EQ(waits.ReadEvent().accepted().predicted_seconds(), 5);
  whole.Send(header).Send(ids).HalfClose();
  const v1::Accepted accepted = whole.ReadEvent().accepted();
  EXPECT_EQ(accepted.predicted_seconds(), 100);
  EXPECT_GT(accepted.predicted_queue_seconds(), 55);
  EXPECT_LE(accepted.predicted_queue_seconds(), 105);
  engine_->Release();
  for (Call* call : {&runs, &waits, &whole}) EXPECT_TRUE(call->Finish().status.ok());
}

TEST_F(FrontEndMetricsTest, TheSlowdownOfACachedPromptIsOfWhatItTakesBehindTheCache) {
  StartServer();
  engine_->PredictSeconds(100);
  engine_->Cache(64, 5);
  Call call(*stub_, absl::Minutes(10));
  ASSERT_TRUE(call.Send(Header(100)).Send(std::vector<uint32_t>(100, 1)).HalfClose().Finish().status.ok());
  const double since_upload = Metric("meshfill_ttft_seconds_sum") - Metric("meshfill_upload_seconds_sum");
  EXPECT_NEAR(Metric("meshfill_slowdown_sum{up_to=\"8192\"}") * 5, since_upload, 1e-3 * since_upload);
}

// What is predicted with the header holds for a second.
TEST_F(FrontEndMetricsTest, ALongUploadIsPlannedAgainWhenItIsComplete) {
  StartServer();
  engine_->PredictSeconds(3);
  Call call(*stub_);
  call.Send(Header(3)).Send({1});
  ASSERT_TRUE(Eventually([&] { return GetPool().requests_size() == 1; }));
  engine_->PredictSeconds(5);
  const absl::Time planned = MonotonicNow();
  ASSERT_TRUE(Eventually([&] { return MonotonicNow() - planned > absl::Seconds(1); }));
  const Reply reply = call.Send({2, 3}).HalfClose().Finish();
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.accepted->predicted_seconds(), 5);
}

// Who runs beside others is told the plan and the seconds of its sub-mesh.
TEST_F(FrontEndMetricsTest, AcceptedSaysThePlanOfTheSubmesh) {
  StartServer({}, /*open=*/true, /*layers=*/4, /*capacity=*/3);
  engine_->Hold(0);
  engine_->PredictSeconds(100);
  engine_->OfferSubmeshes({.submeshes = 2, .seconds = 110});
  constexpr absl::Duration kLong = absl::Minutes(20);  // the predictions leave that much
  Call runs(*stub_, kLong), second(*stub_, kLong), third(*stub_, kLong);
  runs.Send(Header(1)).Send({1}).HalfClose();
  EXPECT_EQ(runs.ReadEvent().accepted().predicted_seconds(), 100);
  ASSERT_TRUE(engine_->WaitForBegun(1));
  second.Send(Header(1)).Send({2}).HalfClose();
  second.ReadEvent();
  third.Send(Header(1)).Send({3}).HalfClose();
  const v1::Accepted accepted = third.ReadEvent().accepted();
  EXPECT_EQ(accepted.predicted_seconds(), 110);
  engine_->Release();
  for (Call* call : {&runs, &second, &third}) EXPECT_TRUE(call->Finish().status.ok());
}

// What a prompt brings to a pass is known with its header, and anew when it is complete.
TEST_F(FrontEndMetricsTest, PromptsThatWaitAtTheSameTimeShareAPass) {
  for (const bool cached : {false, true}) {
    StartServer({}, /*open=*/false);
    engine_->SharePasses({.ranks = 4, .rank_tokens = 1024}, {.least_seconds = 1.2});
    engine_->PredictSeconds(1);
    if (cached) engine_->Cache(64, 1);
    front_end_->Open(std::move(engine_owner_));
    engine_->Hold(0);
    std::vector<uint32_t> ids(100, 1);
    Call runs(*stub_), one(*stub_), two(*stub_), three(*stub_);
    runs.Send(Header(100)).Send(ids).HalfClose();
    ASSERT_TRUE(engine_->WaitForBegun(1));
    for (Call* call : {&one, &two, &three}) {
      call->Send(Header(100)).Send(ids).HalfClose();
      const v1::Accepted accepted = call->ReadEvent().accepted();
      EXPECT_EQ(accepted.queue_position(), 1u);
      EXPECT_NEAR(accepted.predicted_seconds(), call == &one ? 1 : 1.2, 1e-6) << "the pass takes longer";
    }
    FlushLog();
    testing::internal::CaptureStderr();
    engine_->Release();
    for (Call* call : {&runs, &one, &two, &three}) EXPECT_TRUE(call->Finish().status.ok());
    FlushLog();
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find(" pack=3 "), std::string::npos) << log;
    EXPECT_EQ(log.find(" pack=1 "), std::string::npos) << log;
    EXPECT_EQ(engine_->packs(), (std::vector<std::vector<uint32_t>>{{1, 1, 1}}));
    front_end_.reset();
  }
}

TEST_F(FrontEndMetricsTest, RefusalsBeforeTheHeaderAreCounted) {
  StartServer({}, /*open=*/false);
  EXPECT_EQ(Prefill(Header(1), {1}).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Requests("UNAVAILABLE"), 1);
  EXPECT_EQ(Refused("not_ready"), 1);
  EXPECT_EQ(AllRefused(), 1);
}

TEST_F(FrontEndMetricsTest, TheLogHasTheTraceOfAMessageThatNamesOne) {
  StartServer();
  const std::string one = "00-11111111111111111111111111111111-2222222222222222-01";
  const std::string two = "00-33333333333333333333333333333333-4444444444444444-01";
  for (const bool ambiguous : {false, true}) {
    FlushLog();
    testing::internal::CaptureStderr();
    Call traced(*stub_, absl::Seconds(60),
                ambiguous ? std::vector<std::string>{one, two} : std::vector<std::string>{one});
    EXPECT_TRUE(traced.Send(Header(1)).Send({1}).HalfClose().Finish().status.ok());
    FlushLog();
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find("code=OK"), std::string::npos) << log;
    EXPECT_EQ(log.find(one) == std::string::npos, ambiguous) << log;
    EXPECT_EQ(log.find(two), std::string::npos) << log;
  }
}

// This server exports no spans of its own: the trace is the caller's.
TEST_F(FrontEndMetricsTest, ATimeToFirstTokenHasTheTraceThatItsCallerRecords) {
  StartServer();
  for (const bool recorded : {false, true}) {
    Call traced(*stub_, absl::Seconds(60),
                {absl::StrCat("00-11111111111111111111111111111111-2222222222222222-0", recorded ? 1 : 0)});
    EXPECT_TRUE(traced.Send(Header(1)).Send({1}).HalfClose().Finish().status.ok());
    const std::string text = metrics_.Text(MetricsFormat::kOpenMetrics);
    EXPECT_EQ(text.find("# {trace_id=\"11111111111111111111111111111111\"}") != std::string::npos, recorded)
        << text;
  }
}

}  // namespace
}  // namespace meshfill
