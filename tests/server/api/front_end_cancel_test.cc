// Calls that end before their result: cancelled, disconnected, or past their deadline.
#include <optional>
#include <vector>

#include "server/queue/refusal.h"
#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

using FrontEndTest = FrontEndFixture;

TEST_F(FrontEndTest, CancelStopsWhatRuns) {
  StartServer();
  engine_->Hold();
  Call call(*stub_);
  call.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  call.context().TryCancel();
  EXPECT_TRUE(engine_->WaitForStopped(1));
  EXPECT_EQ(call.Finish().status.code(), absl::StatusCode::kCancelled);
  engine_->Release();
  ExpectGoodRequestIsServed();
  EXPECT_TRUE(HasMetric("meshfill_requests_total{code=\"CANCELLED\"} 1"));
}

TEST_F(FrontEndTest, CancelLeavesTheQueueAtOnce) {
  StartServer();
  engine_->Hold();
  Call running(*stub_), waiting(*stub_), uploading(*stub_);
  running.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  waiting.Send(Header(3)).Send({2, 2, 3}).HalfClose();
  EXPECT_EQ(waiting.ReadEvent().accepted().queue_position(), 1u);
  uploading.Send(Header(1000)).Send({1});
  ASSERT_TRUE(Eventually([&] { return GetPool().queued_tokens() == 1003; }));
  waiting.context().TryCancel();
  uploading.context().TryCancel();
  EXPECT_TRUE(Eventually([&] { return GetPool().queued_requests() == 0; }));
  EXPECT_EQ(GetPool().queued_tokens(), 0u);
  engine_->Release();
  EXPECT_TRUE(running.Finish().status.ok());
  EXPECT_EQ(engine_->first_ids(), std::vector<uint32_t>{1});
}

TEST_F(FrontEndTest, DisconnectStopsWhatRuns) {
  StartServer();
  engine_->Hold();
  {
    auto channel = NewChannel();
    auto stub = v1::PrefillService::NewStub(channel);
    Call call(*stub);
    call.Send(Header(3)).Send({1, 2, 3}).HalfClose();
    ASSERT_TRUE(engine_->WaitForBegun(1));
  }  // stream, stub and connection go without a word
  EXPECT_TRUE(engine_->WaitForStopped(1));
  engine_->Release();
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, DeadlineStopsWhatRuns) {
  StartServer();
  engine_->Hold();
  GetPool();  // connects
  Call call(*stub_, absl::Seconds(2));
  call.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  EXPECT_TRUE(engine_->WaitForStopped(1));
  EXPECT_EQ(call.Finish().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Eventually([&] { return HasMetric("meshfill_requests_total{code=\"DEADLINE_EXCEEDED\"} 1"); }));
  engine_->Release();
  ExpectGoodRequestIsServed();
}

// What is cached of a prompt is known when it is complete. Its header is refused where not even that helps.
TEST_F(FrontEndTest, ADeadlineThatACachedPrefixMeetsIsNotRefused) {
  StartServer();
  engine_->PredictSeconds(100);
  const auto refused = [&](const v1::PrefillHeader& header, const std::vector<uint32_t>& ids) {
    return Call(*stub_, absl::Seconds(20)).Send(header).Send(ids).HalfClose().Finish().status;
  };
  const auto by_header = [&](const v1::PrefillHeader& header) {
    const absl::Status status = Call(*stub_, absl::Seconds(20)).Send(header).HalfClose().Finish().status;
    return absl::IsResourceExhausted(status);  // if not, its tokens are missing
  };
  const std::vector<uint32_t> ids(65, 1);
  EXPECT_TRUE(by_header(Header(65))) << "nothing is cached";
  engine_->Cache(64, 5);
  EXPECT_FALSE(by_header(Header(65)));
  EXPECT_TRUE(refused(Header(65), ids).ok());
  EXPECT_TRUE(by_header(Header(100))) << "36 tokens at least are computed";
  v1::PrefillHeader header = Header(65);
  header.mutable_kv()->set_ignore_cache(true);
  EXPECT_TRUE(by_header(header));
  engine_->Cache(64, 50);
  const absl::Status late = refused(Header(65), ids);
  EXPECT_TRUE(absl::IsResourceExhausted(late)) << late;
  EXPECT_TRUE(absl::StrContains(late.message(), "50 s of prefill")) << late;
}

TEST_F(FrontEndTest, RefusesADeadlineThatThePredictionCannotMeet) {
  StartServer();
  engine_->PredictSeconds(100);
  const Reply reply = Call(*stub_, absl::Seconds(10)).Send(Header(3)).Send({1, 2, 3}).HalfClose().Finish();
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kResourceExhausted) << reply.status;
  EXPECT_TRUE(WasRefusedOnce("deadline"));
  EXPECT_EQ(RetryAfter(reply.status), std::nullopt) << "it would be refused for ever: " << reply.status;
  engine_->PredictSeconds(0.001);
  ExpectGoodRequestIsServed();
}

}  // namespace
}  // namespace meshfill
