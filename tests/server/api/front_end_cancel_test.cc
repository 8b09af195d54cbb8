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
