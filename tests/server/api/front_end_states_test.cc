// A front-end that is full, draining, stopped or loading: what it refuses, what it finishes, and its health.
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "kernels/monotonic_time.h"
#include "server/queue/refusal.h"
#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

using FrontEndTest = FrontEndFixture;

TEST_F(FrontEndTest, FullQueueSaysWhenToTryAgain) {
  const std::map<std::string, std::string> reasons = {{"queue.max_requests=1", "queue_requests"},
                                                      {"queue.max_tokens=10", "queue_tokens"},
                                                      {"queue.max_wait=100s", "queue_wait"},
                                                      {"tenant_limits.max_requests=1", "tenant_share"}};
  for (const auto& [limit, reason] : reasons) {
    SCOPED_TRACE(limit);
    StartServer({limit});
    engine_->Hold(0);
    engine_->PredictSeconds(60);
    Call running(*stub_, absl::Hours(1)), waiting(*stub_, absl::Hours(1));
    running.Send(Header(3)).Send({1, 2, 3}).HalfClose();
    ASSERT_TRUE(engine_->WaitForBegun(1));
    waiting.Send(Header(8)).Send({1, 2, 3, 4, 5, 6, 7, 8}).HalfClose();
    EXPECT_TRUE(waiting.ReadEvent().has_accepted());
    const Reply refused = Call(*stub_, absl::Hours(1)).Send(Header(3)).Send({1, 2, 3}).HalfClose().Finish();
    EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted) << refused.status;
    EXPECT_TRUE(WasRefusedOnce(reason));
    const auto retry = RetryAfter(refused.status);
    ASSERT_TRUE(retry.has_value()) << refused.status;
    EXPECT_GT(*retry, absl::Seconds(10));
    EXPECT_LE(*retry, absl::Seconds(60));
    engine_->PredictSeconds(0.001);
    engine_->Release();
    EXPECT_TRUE(running.Finish().status.ok());
    EXPECT_TRUE(waiting.Finish().status.ok());
    ExpectGoodRequestIsServed();
    front_end_.reset();
  }
}

TEST_F(FrontEndTest, WhoHasWaitedForMaxAgeGoesFirst) {
  StartServer({"queue.max_age=300ms"});
  engine_->Hold();
  Call running(*stub_), old(*stub_), urgent(*stub_);
  running.Send(Header(1)).Send({1}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  old.Send(Header(1)).Send({2}).HalfClose();
  EXPECT_TRUE(old.ReadEvent().has_accepted());
  ASSERT_TRUE(Eventually([&] { return GetPool().requests(1).elapsed_seconds() > 0.35; }));
  v1::PrefillHeader header = Header(1);
  header.set_priority(2);
  urgent.Send(header).Send({3}).HalfClose();
  EXPECT_TRUE(urgent.ReadEvent().has_accepted());
  engine_->Release();
  for (Call* call : {&running, &old, &urgent}) EXPECT_TRUE(call->Finish().status.ok());
  EXPECT_EQ(engine_->first_ids(), (std::vector<uint32_t>{1, 2, 3}));
}

TEST_F(FrontEndTest, DrainFinishesTheAcceptedAndRefusesTheNew) {
  StartServer();
  engine_->Hold();
  Call running(*stub_), waiting(*stub_);
  running.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  waiting.Send(Header(3)).Send({2, 2, 3}).HalfClose();
  EXPECT_TRUE(waiting.ReadEvent().has_accepted());
  front_end_->StartDrain();
  const Reply refused = Prefill(Header(3), {1, 2, 3});
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kUnavailable) << refused.status;
  EXPECT_EQ(GetPool().state(), v1::PoolStatus::STATE_DRAINING);
  EXPECT_FALSE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Milliseconds(50)));
  engine_->Release();
  EXPECT_TRUE(running.Finish().status.ok());
  EXPECT_TRUE(waiting.Finish().status.ok());
  EXPECT_TRUE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
}

// A stream without a header is no accepted request.
TEST_F(FrontEndTest, DrainWaitsForNoStreamWithoutAHeader) {
  StartServer();  // limits.upload_timeout is 30 s
  Call silent(*stub_), uploading(*stub_);
  uploading.Send(Header(3)).Send({1});
  ASSERT_TRUE(Eventually([&] { return GetPool().requests_size() == 1; }));
  front_end_->StartDrain();
  EXPECT_EQ(silent.Finish().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(uploading.Send({2, 3}).HalfClose().Finish().status.ok()) << "its header had been accepted";
  EXPECT_TRUE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
}

TEST_F(FrontEndTest, StopEndsWhatIsLeft) {
  StartServer();
  engine_->Hold();
  Call running(*stub_), waiting(*stub_), uploading(*stub_);
  running.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  waiting.Send(Header(3)).Send({2, 2, 3}).HalfClose();
  EXPECT_TRUE(waiting.ReadEvent().has_accepted());
  uploading.Send(Header(3)).Send({1});
  std::thread stop([&] { front_end_->Stop(); });
  EXPECT_EQ(running.Finish().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiting.Finish().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(uploading.Finish().status.code(), absl::StatusCode::kUnavailable) << "it was waited for";
  stop.join();
}

TEST_F(FrontEndTest, HealthFollowsTheState) {
  StartServer({}, /*open=*/false);
  const std::string service = "meshfill.v1.PrefillService";
  EXPECT_EQ(Health(""), 1);
  EXPECT_EQ(Health(service), 2);
  EXPECT_EQ(GetPool().state(), v1::PoolStatus::STATE_LOADING);
  EXPECT_EQ(Prefill(Header(1), {1}).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(WasRefusedOnce("not_ready"));
  EXPECT_TRUE(HasMetric("meshfill_ranks{state=\"loading\"} 4"));

  front_end_->Open(std::move(engine_owner_));
  EXPECT_EQ(Health(""), 1);
  EXPECT_EQ(Health(service), 1);
  EXPECT_EQ(GetPool().state(), v1::PoolStatus::STATE_READY);
  EXPECT_TRUE(HasMetric("meshfill_ranks{state=\"loading\"} 0"));
  EXPECT_TRUE(HasMetric("meshfill_ranks{state=\"ready\"} 4"));
  ExpectGoodRequestIsServed();

  front_end_->StartDrain();
  EXPECT_EQ(Health(""), 1);
  EXPECT_EQ(Health(service), 2);
  EXPECT_TRUE(HasMetric("meshfill_ranks{state=\"draining\"} 4"));
  front_end_->Refresh();
  EXPECT_EQ(Health(service), 2) << "it still drains";
}

TEST_F(FrontEndTest, MayDrainBeforeItIsLoaded) {
  StartServer({}, /*open=*/false);
  front_end_->StartDrain();
  EXPECT_EQ(GetPool().state(), v1::PoolStatus::STATE_DRAINING);
  EXPECT_EQ(GetPool().ranks(), 4u);
  EXPECT_EQ(Prefill(Header(1), {1}).status.code(), absl::StatusCode::kUnavailable);
}

// As where a device of an embedded pool has failed.
TEST_F(FrontEndTest, ALostPoolIsNotReadyAndHasNoRanks) {
  StartServer();
  front_end_->Refresh();
  EXPECT_FALSE(front_end_->lost());
  EXPECT_TRUE(HasMetric("meshfill_ranks{state=\"ready\"} 4"));
  engine_->Lose();
  front_end_->Refresh();
  EXPECT_TRUE(front_end_->lost());
  EXPECT_EQ(Health("meshfill.v1.PrefillService"), 2);
  EXPECT_EQ(GetPool().ranks(), 0);
  for (const char* state : {"loading", "ready", "draining"}) {
    EXPECT_TRUE(HasMetric(absl::StrCat("meshfill_ranks{state=\"", state, "\"} 0"))) << state;
  }
}

// Workers may come.
TEST_F(FrontEndTest, APoolWithoutWorkersIsNotLost) {
  StartServer({"pool.control_listen=127.0.0.1:0", "pool.tls.insecure=true"});
  engine_->Lose();
  front_end_->Refresh();
  EXPECT_FALSE(front_end_->lost());
  EXPECT_EQ(Health("meshfill.v1.PrefillService"), 2);
}

}  // namespace
}  // namespace meshfill
