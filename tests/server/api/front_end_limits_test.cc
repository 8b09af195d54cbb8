// What the front-end bounds: slow uploads, results that nobody reads, connections and streams.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "kernels/monotonic_time.h"
#include "server/queue/queue_room.h"
#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

using FrontEndTest = FrontEndFixture;

TEST_F(FrontEndTest, EndsUploadsThatStandStill) {
  StartServer({"limits.upload_timeout=1s", "limits.upload_tokens_per_second=1"});
  Call silent(*stub_), stalled(*stub_);
  stalled.Send(Header(3)).Send({1, 2});
  for (Call* call : {&silent, &stalled}) {
    const Reply reply = call->Finish();
    EXPECT_EQ(reply.status.code(), absl::StatusCode::kDeadlineExceeded) << reply.status;
    EXPECT_NE(std::string(reply.status.message()).find("limits.upload_timeout"), std::string::npos)
        << reply.status;
  }
  // Neither a slow but steady upload nor a long prefill is meant.
  engine_->Hold();
  Call steady(*stub_);
  steady.Send(Header(3));
  for (uint32_t id : {1u, 2u, 3u}) {
    absl::SleepFor(absl::Milliseconds(400));
    steady.Send({id});
  }
  steady.HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  absl::SleepFor(absl::Milliseconds(1500));
  engine_->Release();
  EXPECT_TRUE(steady.Finish().status.ok());
}

TEST_F(FrontEndTest, EndsUploadsThatAreSlowButNeverSilent) {
  StartServer({"limits.upload_timeout=1s", "limits.upload_tokens_per_second=1000"});
  Call empty(*stub_), dripping(*stub_);
  std::thread drip([&] {
    empty.Send(Header(1 << 20));
    dripping.Send(Header(1 << 20));
    for (int i = 0; i < 40; ++i) {  // 4 s of messages that come often, and bring next to nothing
      empty.Send(std::vector<uint32_t>{});
      dripping.Send({1});
      absl::SleepFor(absl::Milliseconds(100));
    }
  });
  for (Call* call : {&empty, &dripping}) {
    const Reply reply = call->Finish();
    EXPECT_EQ(reply.status.code(), absl::StatusCode::kDeadlineExceeded) << reply.status;
    EXPECT_NE(std::string(reply.status.message()).find("limits.upload_tokens_per_second"), std::string::npos)
        << reply.status;
  }
  EXPECT_EQ(GetPool().queued_requests(), 0u);
  drip.join();
  ExpectGoodRequestIsServed();
  // 2,000 tokens pay for 2 s more.
  Call steady(*stub_);
  steady.Send(Header(2001)).Send(std::vector<uint32_t>(2000, 1));
  for (int i = 0; i < 3; ++i) {
    absl::SleepFor(absl::Milliseconds(500));
    steady.Send(std::vector<uint32_t>{});
  }
  EXPECT_TRUE(steady.Send({1}).HalfClose().Finish().status.ok());
}

TEST_F(FrontEndTest, BoundsWhatAResultHolds) {
  StartServer({"limits.max_top_k=5", "limits.return_logits=false"});
  v1::PrefillHeader header = Header(1);
  header.set_top_k(6);
  const Reply many = Prefill(header, {1});
  EXPECT_EQ(many.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(many.status.message()).find("limits.max_top_k"), std::string::npos) << many.status;
  header.set_top_k(5);
  EXPECT_TRUE(Prefill(header, {1}).status.ok());
  header.set_return_logits(true);
  const Reply logits = Prefill(header, {1});
  EXPECT_EQ(logits.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(logits.status.message()).find("limits.return_logits"), std::string::npos)
      << logits.status;
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, BoundsThePriorityOfATenant) {
  StartServer({"tenants.batch.max_priority=-1"});
  v1::PrefillHeader header = Header(1);
  header.set_tenant("batch");
  const Reply high = Prefill(header, {1});
  EXPECT_EQ(high.status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(std::string(high.status.message()).find("max_priority"), std::string::npos) << high.status;
  EXPECT_TRUE(WasRefusedOnce("credentials"));
  header.set_priority(-1);
  EXPECT_TRUE(Prefill(header, {1}).status.ok());
  header.set_tenant("another");
  header.set_priority(2);
  EXPECT_TRUE(Prefill(header, {1}).status.ok());
}

// A channel whose windows take next to nothing until the application reads.
std::shared_ptr<grpc::Channel> ChannelThatTakesNothing(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

TEST_F(FrontEndTest, DropsAResultThatNobodyReads) {
  StartServer({"limits.result_timeout=300ms"});
  const auto stub = v1::PrefillService::NewStub(ChannelThatTakesNothing(front_end_->address()));
  Call call(*stub);
  call.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(Eventually([&] { return engine_->finished_runs() == 1; }));
  EXPECT_TRUE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
  EXPECT_FALSE(call.Finish().result.has_value());
  EXPECT_EQ(Metric("meshfill_results_dropped_total"), 1);
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, AResultThatNobodyReadsDoesNotHoldUpADrain) {
  StartServer();  // limits.result_timeout is 30 s
  const auto stub = v1::PrefillService::NewStub(ChannelThatTakesNothing(front_end_->address()));
  Call call(*stub);
  call.Send(Header(3)).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(Eventually([&] { return engine_->finished_runs() == 1; }));
  front_end_->StartDrain();
  EXPECT_TRUE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
}

TEST_F(FrontEndTest, BoundsTheBytesOfResultsThatNobodyReads) {
  StartServer({"limits.unread_bytes=3000B"});
  const auto stub = v1::PrefillService::NewStub(ChannelThatTakesNothing(front_end_->address()));
  v1::PrefillHeader header = Header(1);
  header.set_return_logits(true);  // 256 of 4 bytes: two results fit, three do not
  constexpr int kCalls = 6;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(std::make_unique<Call>(*stub));
    calls.back()->Send(header).Send({1}).HalfClose();
    ASSERT_TRUE(Eventually([&] { return engine_->finished_runs() == i + 1; }));
  }
  ASSERT_TRUE(
      Eventually([&] { return HasMetric(absl::StrCat("meshfill_results_dropped_total ", kCalls - 2)); }));
  for (int i = 0; i < kCalls; ++i) {
    const Reply reply = calls[i]->Finish();
    EXPECT_EQ(reply.result.has_value(), i >= kCalls - 2) << i << " " << reply.status;
  }
  ExpectGoodRequestIsServed();
}

// K and V are their readers' while the lease lasts, and nobody's then, though the prefill's client is slow.
TEST_F(FrontEndTest, AnUnreadResultHoldsNoKv) {
  StartServer({"limits.result_timeout=1h"});
  engine_->Hold();
  const auto stub = v1::PrefillService::NewStub(ChannelThatTakesNothing(front_end_->address()));
  v1::PrefillHeader header = Header(3);
  header.mutable_kv()->set_keep(true);
  Call call(*stub);
  call.Send(header).Send({1, 2, 3}).HalfClose();
  v1::ReleaseKvRequest request;
  request.set_lease(call.ReadEvent().accepted().kv_lease());
  ASSERT_TRUE(Eventually([&] { return Metric("meshfill_kv_bytes") > 0; }));
  engine_->Release();
  ASSERT_TRUE(Eventually([&] { return engine_->finished_runs() == 1; }));
  grpc::ClientContext context;
  v1::ReleaseKvReply reply;
  EXPECT_TRUE(stub_->ReleaseKv(&context, request, &reply).ok());
  EXPECT_TRUE(Eventually([&] { return Metric("meshfill_kv_bytes") == 0; }));
  EXPECT_TRUE(call.Finish().status.ok());
}

// Room that leases will make later is none now, and an upload would not wait for it.
TEST_F(FrontEndTest, ALongPromptWithoutRoomForKvIsRefusedWithItsHeader) {
  StartServer();
  v1::PrefillHeader header = Header(1000);
  header.mutable_kv()->set_keep(true);
  header.mutable_kv()->set_lease_seconds(600);
  EXPECT_TRUE(Prefill(header, std::vector<uint32_t>(1000, 7)).status.ok());
  const KvShape shape = KvShapeOf(engine_->model());
  header.set_token_count(FakeEngine::kKvBytes / shape.LayerBytes(1) / shape.layers);  // all the room
  ASSERT_GT(header.token_count(), static_cast<uint64_t>(QueueRoom::kFreeTokens));
  const absl::Status refused = Call(*stub_).Send(header).HalfClose().Finish().status;
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(RetryAfter(refused).has_value()) << refused;
}

// Neither where leases have the room, nor where a prefill that runs has it.
TEST_F(FrontEndTest, WhoHasNoRoomForKvTakesNobodysPlace) {
  StartServer({"queue.max_requests=2"});
  const KvShape shape = KvShapeOf(engine_->model());
  const int64_t all_tokens = FakeEngine::kKvBytes / shape.LayerBytes(1) / shape.layers;
  for (const bool runs : {false, true}) {
    const int64_t taken = runs ? all_tokens - 500 : 1000, asks = runs ? 1000 : all_tokens;
    v1::PrefillHeader keeps = Header(taken);
    keeps.mutable_kv()->set_keep(true);
    keeps.mutable_kv()->set_lease_seconds(600);
    v1::PrefillHeader busy = Header(1);
    busy.set_tenant("busy");
    std::vector<std::unique_ptr<Call>> calls;
    const auto accept = [&](const v1::PrefillHeader& header) {
      calls.push_back(std::make_unique<Call>(*stub_));
      calls.back()->Send(header).Send(std::vector<uint32_t>(header.token_count(), 7)).HalfClose();
      return calls.back()->ReadEvent();
    };
    v1::ReleaseKvRequest lease;
    if (!runs) {
      lease.set_lease(accept(keeps).accepted().kv_lease());
      EXPECT_TRUE(calls.back()->Finish().status.ok());
      calls.clear();
    }
    engine_->Hold(0);
    const v1::PrefillEvent first = accept(runs ? keeps : busy);
    ASSERT_TRUE(first.has_accepted());
    ASSERT_TRUE(engine_->WaitForBegun(runs ? 5 : 2));
    if (runs) lease.set_lease(first.accepted().kv_lease());
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(accept(busy).has_accepted());  // they have all places
    keeps.set_token_count(asks);
    const absl::Status refused = Call(*stub_).Send(keeps).HalfClose().Finish().status;
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "of K and V")) << refused;
    EXPECT_EQ(GetPool().requests_size(), 3);
    engine_->Release();
    for (const auto& call : calls) EXPECT_TRUE(call->Finish().status.ok());
    grpc::ClientContext context;
    v1::ReleaseKvReply reply;
    EXPECT_TRUE(stub_->ReleaseKv(&context, lease, &reply).ok());
  }
}

TEST_F(FrontEndTest, BoundsTheConnections) {
  StartServer({"limits.max_connections=2"});
  ExpectGoodRequestIsServed();
  const auto is_served = [&](const std::shared_ptr<grpc::Channel>& channel) {
    const auto stub = v1::PrefillService::NewStub(channel);
    return Call(*stub, absl::Seconds(10)).Send(Header(1)).Send({1}).HalfClose().Finish().status.ok();
  };
  auto second = NewChannel();
  EXPECT_TRUE(is_served(second));
  EXPECT_FALSE(is_served(NewChannel()));
  ExpectGoodRequestIsServed();
  second.reset();
  EXPECT_TRUE(Eventually([&] { return is_served(NewChannel()); }));
}

TEST_F(FrontEndTest, TheLongestTimeoutsOfGrpcAreNotOver) {
  StartServer();
  // 99999999H, which is more nanoseconds than an int64_t has; 2562047H is the most that has.
  for (const int64_t hours : {2'000'000, 2'070'001, 2'562'047, 99'999'999}) {
    grpc::ClientContext context;
    context.set_deadline(gpr_timespec{.tv_sec = gpr_now(GPR_CLOCK_REALTIME).tv_sec + hours * 3600,
                                      .tv_nsec = 0,
                                      .clock_type = GPR_CLOCK_REALTIME});
    auto stream = stub_->Prefill(&context);
    v1::PrefillRequest request;
    *request.mutable_header() = Header(1);
    stream->Write(request);
    request.mutable_tokens()->add_ids(1);
    stream->Write(request);
    stream->WritesDone();
    v1::PrefillEvent event;
    while (stream->Read(&event)) continue;
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << hours << ": " << status.error_message();
  }
}

TEST_F(FrontEndTest, BoundsTheStreamsOfAConnection) {
  StartServer({"limits.max_streams=2"});
  Call one(*stub_), two(*stub_);
  one.Send(Header(3)).Send({1});
  two.Send(Header(3)).Send({1});
  ASSERT_TRUE(Eventually([&] { return HasMetric("meshfill_queue_requests 2"); }));
  Call three(*stub_, absl::Milliseconds(200));  // waits in the client for a free stream
  EXPECT_EQ(three.Send(Header(3)).Send({1, 2, 3}).HalfClose().Finish().status.code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(HasMetric("meshfill_requests_total{code=\"DEADLINE_EXCEEDED\"} 0")) << "it reached the server";
  one.context().TryCancel();
  EXPECT_EQ(one.Finish().status.code(), absl::StatusCode::kCancelled);
  ExpectGoodRequestIsServed();
  EXPECT_TRUE(two.Send({2, 3}).HalfClose().Finish().status.ok());
}

}  // namespace
}  // namespace meshfill
