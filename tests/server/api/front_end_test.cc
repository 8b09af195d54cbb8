#include "server/api/front_end.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "kernels/monotonic_time.h"
#include "server/api/status_details.h"
#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

using FrontEndTest = FrontEndFixture;

// ---- The good way.

TEST_F(FrontEndTest, AnswersAPrompt) {
  StartServer();
  v1::PrefillHeader header = Header(6);
  header.set_request_id("my-request");
  header.set_model("fake-model");
  header.set_top_k(3);
  header.set_return_logits(true);
  const Reply reply = Call(*stub_)
                          .Send(header)
                          .Send({1, 2})
                          .Send(std::vector<uint32_t>{})
                          .Send({3, 4, 5, 255})
                          .HalfClose()
                          .Finish();
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  ASSERT_TRUE(reply.accepted.has_value());
  EXPECT_EQ(reply.accepted->request_id(), "my-request");
  EXPECT_EQ(reply.accepted->queue_position(), 0u);
  EXPECT_DOUBLE_EQ(reply.accepted->predicted_seconds(), 0.001);
  EXPECT_EQ(reply.accepted->plan().ranks(), 4u);
  ASSERT_FALSE(reply.progress.empty());
  EXPECT_EQ(reply.progress.back().layers_done(), 4u);
  EXPECT_EQ(reply.progress.back().layers(), 4u);

  const v1::PrefillResult& result = *reply.result;
  EXPECT_EQ(result.request_id(), "my-request");
  EXPECT_EQ(result.tokens(), 6u);
  EXPECT_EQ(result.first_token(), (1u + 2 + 3 + 4 + 5 + 255) % 256);
  ASSERT_EQ(result.top_size(), 3);
  EXPECT_EQ(result.top(0).token(), result.first_token());
  EXPECT_EQ(result.plan().layout(), v1::LAYOUT_STRIPED);
  EXPECT_EQ(result.plan().a(), 2u);
  EXPECT_EQ(result.plan().stripe(),
            static_cast<uint64_t>(TokenLayout::Make(LayoutKind::kStriped, 4, 6, 64)->stripe()));
  EXPECT_GE(result.seconds().queue(), 0);
  EXPECT_DOUBLE_EQ(result.seconds().attention(), 0.5);
  EXPECT_EQ(result.comm_bytes().kv(), 2u);
  EXPECT_EQ(result.logits_size(), FakeEngine::kVocab);
  EXPECT_TRUE(HasMetric("meshfill_requests_total{code=\"OK\"} 1"));
}

TEST_F(FrontEndTest, ChoosesRequestIdsThatAreUnique) {
  StartServer();
  const Reply one = Prefill(Header(1), {1}), two = Prefill(Header(1), {1});
  ASSERT_TRUE(one.status.ok() && two.status.ok());
  EXPECT_FALSE(one.accepted->request_id().empty());
  EXPECT_NE(one.accepted->request_id(), two.accepted->request_id());
  EXPECT_EQ(one.result->request_id(), one.accepted->request_id());
  EXPECT_EQ(one.result->logits_size(), 0);
}

TEST_F(FrontEndTest, PassesPlanOverridesOn) {
  StartServer();
  v1::PrefillHeader header = Header(3);
  header.mutable_plan()->mutable_tile()->set_a(1);
  header.mutable_plan()->mutable_tile()->set_b(4);
  header.mutable_plan()->set_layout(v1::LAYOUT_ZIGZAG);
  const Reply reply = Prefill(header, {1, 2, 3});
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.result->plan().a(), 1u);
  EXPECT_EQ(reply.result->plan().b(), 4u);
  EXPECT_EQ(reply.result->plan().heads(), 1u);
  EXPECT_EQ(reply.result->plan().layout(), v1::LAYOUT_ZIGZAG);
}

TEST_F(FrontEndTest, TakesFourMillionIds) {
  StartServer();
  constexpr size_t kTokens = 4'000'000, kChunk = 65'536;
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<uint32_t> ids(kTokens);
  for (uint32_t& id : ids) id = random() % FakeEngine::kVocab;
  Call call(*stub_);
  call.Send(Header(kTokens));
  for (size_t begin = 0; begin < kTokens; begin += kChunk) {
    call.Send(std::vector<uint32_t>(ids.begin() + begin, ids.begin() + std::min(begin + kChunk, kTokens)));
  }
  const Reply reply = call.HalfClose().Finish();
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.result->tokens(), kTokens);
  EXPECT_EQ(reply.result->first_token(), std::accumulate(ids.begin(), ids.end(), uint64_t{0}) % 256);
}

TEST_F(FrontEndTest, CoalescesProgressForAClientThatDoesNotRead) {
  constexpr int kLayers = 200'000;  // far more events than HTTP/2's windows hold
  StartServer({}, /*open=*/true, kLayers);
  Call call(*stub_);
  call.Send(Header(2)).Send({1, 2}).HalfClose();
  ASSERT_TRUE(Eventually([&] { return engine_->finished_runs() == 1; }));
  const Reply reply = call.Finish();
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  ASSERT_TRUE(reply.result.has_value());
  ASSERT_FALSE(reply.progress.empty());
  EXPECT_LT(reply.progress.size(), kLayers / 2u);
  for (size_t i = 1; i < reply.progress.size(); ++i) {
    EXPECT_LT(reply.progress[i - 1].layers_done(), reply.progress[i].layers_done());
  }
  EXPECT_EQ(reply.progress.back().layers_done(), static_cast<uint32_t>(kLayers));
}

// ---- Bad input: each row of the API's table, and the next good request is served.

struct BadRequest {
  std::string name;
  std::function<Reply(Call& call)> send;
  absl::StatusCode code;
  std::string message;  // part of it
};

Reply SendHeader(Call& call, const std::function<void(v1::PrefillHeader&)>& change) {
  v1::PrefillHeader header = Header(3);
  change(header);
  return call.Send(header).Send({1, 2, 3}).HalfClose().Finish();
}

std::vector<BadRequest> BadRequests() {
  using absl::StatusCode;
  const auto header = [](std::function<void(v1::PrefillHeader&)> change) {
    return [change](Call& call) { return SendHeader(call, change); };
  };
  return {
      {"nothing", [](Call& call) { return call.HalfClose().Finish(); }, StatusCode::kInvalidArgument,
       "without a header"},
      {"tokens first", [](Call& call) { return call.Send({1}).HalfClose().Finish(); },
       StatusCode::kInvalidArgument, "tokens before the header"},
      {"two headers",
       [](Call& call) { return call.Send(Header(1)).Send(Header(1)).Send({1}).HalfClose().Finish(); },
       StatusCode::kInvalidArgument, "a second header"},
      {"no tokens", [](Call& call) { return call.Send(Header(0)).HalfClose().Finish(); },
       StatusCode::kInvalidArgument, "token_count is 0"},
      {"too few",
       [](Call& call) {
         return call.Send(Header(4)).Send({1, 2, 3}).HalfClose().Finish();
       },
       StatusCode::kInvalidArgument, "announced 4 tokens, but only 3 came"},
      {"too many, refused without half-close",
       [](Call& call) {
         return call.Send(Header(4)).Send({1, 2, 3}).Send({4, 5}).Finish();
       },
       StatusCode::kInvalidArgument, "announced 4 tokens, but 5 have come"},
      {"id outside the vocabulary, refused without half-close",
       [](Call& call) {
         return call.Send(Header(9)).Send({1, 255}).Send({3, 256, 999}).Finish();
       },
       StatusCode::kInvalidArgument, "token 3 has id 256, outside the vocabulary of 256"},
      {"largest id", [](Call& call) { return call.Send(Header(1)).Send({UINT32_MAX}).Finish(); },
       StatusCode::kInvalidArgument, "token 0 has id 4294967295, outside the vocabulary of 256"},
      {"unknown model", header([](auto& h) { h.set_model("other"); }), StatusCode::kNotFound,
       "model \"other\" is not served here"},
      {"longer than the context",
       [](Call& call) { return call.Send(Header(FakeEngine::kContext + 1)).Finish(); },
       StatusCode::kOutOfRange, "fake-model is for 8388608 at most"},
      {"absurdly long", [](Call& call) { return call.Send(Header(UINT64_MAX)).Finish(); },
       StatusCode::kOutOfRange,
       "the prompt has 18446744073709551615 tokens; model fake-model is for 8388608 at most"},
      {"more than the memory",
       [](Call& call) { return call.Send(Header(FakeEngine::kMemoryTokens + 1)).Finish(); },
       StatusCode::kFailedPrecondition, "memory"},
      {"top_k", header([](auto& h) { h.set_top_k(257); }), StatusCode::kInvalidArgument,
       "top_k is 257; it must be 1 to the vocabulary's 256; ask for fewer"},
      {"empty tile", header([](auto& h) { h.mutable_plan()->mutable_tile(); }), StatusCode::kInvalidArgument,
       "0x0"},
      {"tile without columns", header([](auto& h) { h.mutable_plan()->mutable_tile()->set_a(4); }),
       StatusCode::kInvalidArgument, "plan.tile is 4x0"},
      {"huge tile", header([](auto& h) {
         h.mutable_plan()->mutable_tile()->set_a(1u << 31);
         h.mutable_plan()->mutable_tile()->set_b(2);
       }),
       StatusCode::kInvalidArgument, "2147483648x2"},
      {"tile that does not multiply to the ranks", header([](auto& h) {
         h.mutable_plan()->mutable_tile()->set_a(3);
         h.mutable_plan()->mutable_tile()->set_b(2);
       }),
       StatusCode::kInvalidArgument, "does not multiply"},
      {"layout", header([](auto& h) { h.mutable_plan()->set_layout(static_cast<v1::Layout>(17)); }),
       StatusCode::kInvalidArgument, "plan.layout is 17"},
      {"long request_id", header([](auto& h) { h.set_request_id(std::string(129, 'x')); }),
       StatusCode::kInvalidArgument, "request_id has 129"},
      {"long tenant", header([](auto& h) { h.set_tenant(std::string(129, 'x')); }),
       StatusCode::kInvalidArgument, "tenant has 129"},
      {"message above the limit",
       [](Call& call) { return call.Send(Header(9)).Send(std::vector<uint32_t>(5 << 20, 1)).Finish(); },
       StatusCode::kResourceExhausted,
       "a message after 0 tokens has 5242890 bytes; at most 4194304 are allowed (limits.max_message_bytes); "
       "send smaller messages"},
  };
}

TEST_F(FrontEndTest, RefusesBadRequestsAndServesTheNextGoodOne) {
  StartServer();
  for (const BadRequest& bad : BadRequests()) {
    SCOPED_TRACE(bad.name);
    Call call(*stub_);
    const Reply reply = bad.send(call);
    EXPECT_EQ(reply.status.code(), bad.code) << reply.status;
    EXPECT_NE(std::string(reply.status.message()).find(bad.message), std::string::npos) << reply.status;
    EXPECT_FALSE(reply.accepted.has_value() || reply.result.has_value());
    ExpectGoodRequestIsServed();
    EXPECT_EQ(GetPool().queued_requests(), 0u);
    EXPECT_EQ(GetPool().queued_tokens(), 0u);
  }
}

TEST_F(FrontEndTest, PassesTheEnginesErrorsOn) {
  StartServer();
  engine_->FailNext(absl::InternalError("NaN in the logits of token 2"));
  const Reply reply = Prefill(Header(3), {1, 2, 3});
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(reply.status.message()).find("NaN"), std::string::npos);
  EXPECT_TRUE(HasMetric("meshfill_requests_refused_total{reason=\"other\"} 0")) << "it had a place";
  EXPECT_TRUE(reply.accepted.has_value());
  EXPECT_FALSE(reply.result.has_value());
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, RefusesALiveIdAgain) {
  StartServer();
  engine_->Hold();
  v1::PrefillHeader header = Header(3);
  header.set_request_id("same");
  Call first(*stub_);
  first.Send(header).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  const Reply again = Prefill(header, {4, 5, 6});
  EXPECT_EQ(again.status.code(), absl::StatusCode::kAlreadyExists) << again.status;
  EXPECT_TRUE(WasRefusedOnce("duplicate"));
  v1::PrefillHeader bad = header;  // whatever the body
  bad.set_token_count(0);
  bad.set_model("another");
  bad.set_top_k(1 << 30);
  EXPECT_EQ(Prefill(bad, {4, 5, 6}).status.code(), absl::StatusCode::kAlreadyExists);
  engine_->Release();
  EXPECT_TRUE(first.Finish().status.ok());
  EXPECT_TRUE(Prefill(header, {4, 5, 6}).status.ok());  // no longer live
}

TEST_F(FrontEndTest, EndsUploadsThatStandStill) {
  StartServer({"limits.upload_timeout=150ms", "limits.upload_tokens_per_second=10"});
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
    absl::SleepFor(absl::Milliseconds(80));
    steady.Send({id});
  }
  steady.HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  absl::SleepFor(absl::Milliseconds(300));
  engine_->Release();
  EXPECT_TRUE(steady.Finish().status.ok());
}

TEST_F(FrontEndTest, EndsUploadsThatAreSlowButNeverSilent) {
  StartServer({"limits.upload_timeout=300ms", "limits.upload_tokens_per_second=1000"});
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
  // 600 tokens pay for 0.6 s more.
  Call steady(*stub_);
  steady.Send(Header(601)).Send(std::vector<uint32_t>(600, 1));
  for (int i = 0; i < 3; ++i) {
    absl::SleepFor(absl::Milliseconds(180));
    steady.Send(std::vector<uint32_t>{});
  }
  EXPECT_TRUE(steady.Send({1}).HalfClose().Finish().status.ok());
}

TEST_F(FrontEndTest, AMessageThatCannotBeDecodedIsNoHalfClose) {
  StartServer();
  v1::PrefillRequest header, tokens;
  *header.mutable_header() = Header(4);
  for (const uint32_t id : {1, 2, 3, 4}) tokens.mutable_tokens()->add_ids(id);
  const std::string good_header = header.SerializeAsString(), good_tokens = tokens.SerializeAsString();
  const std::string bad_id = std::string("\x0a\x05\x0a\x03", 4) + "\xff\xfe\xfd";  // request_id: no UTF-8
  const std::string garbage = "\xff\xff\xff\xff garbage";
  for (const std::vector<std::string>& messages :
       std::vector<std::vector<std::string>>{{good_header, good_tokens, garbage},
                                             {good_header, good_tokens, garbage, good_tokens},
                                             {good_header, good_tokens.substr(0, good_tokens.size() - 1)},
                                             {good_header.substr(0, good_header.size() - 1), good_tokens},
                                             {bad_id, good_tokens},
                                             {garbage}}) {
    const auto [status, answer] = CallRaw("/meshfill.v1.PrefillService/Prefill", messages);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_NE(status.error_message().find("cannot be decoded"), std::string::npos) << status.error_message();
    EXPECT_EQ(answer, "");
    ExpectGoodRequestIsServed();
  }
}

TEST_F(FrontEndTest, AnIdOfMoreThan32BitsIsNotCut) {
  StartServer();
  v1::PrefillRequest header;
  *header.mutable_header() = Header(4);
  const std::string ids("\x12\x0b\x0a\x07\x01\x85\x80\x80\x80\x10\x02\x08\x03", 13);  // 1, 2^32 + 5, 2; 3
  const auto [status, answer] =
      CallRaw("/meshfill.v1.PrefillService/Prefill", {header.SerializeAsString(), ids});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_EQ(
      status.error_message(),
      "token 1 has id 4294967301, outside the vocabulary of 256; use the tokenizer of model fake-model");
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, EveryCallThatCannotBeDecodedSaysSo) {
  StartServer();
  for (const char* method : {"FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"}) {
    SCOPED_TRACE(method);
    const auto [status, answer] =
        CallRaw(absl::StrCat("/meshfill.v1.PrefillService/", method), {"\xff\xff\xff\xff garbage"});
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), absl::StrCat("the request cannot be decoded; send meshfill.v1.", method,
                                                   "Request, uncompressed, its texts in UTF-8"));
    EXPECT_EQ(answer, "");
  }
  EXPECT_EQ(GetPool().ranks(), 4u);
}

TEST_F(FrontEndTest, EveryCallThatIsTooLongSaysSo) {
  StartServer({"limits.max_message_bytes=64KiB"});
  for (const char* method : {"Prefill", "FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"}) {
    SCOPED_TRACE(method);
    for (const size_t bytes : {size_t{64} << 10, (size_t{64} << 10) + 1, size_t{8} << 20}) {
      const auto [status, answer] =
          CallRaw(absl::StrCat("/meshfill.v1.PrefillService/", method), {std::string(bytes, '\xff')});
      const bool allowed = bytes == size_t{64} << 10;
      EXPECT_EQ(status.error_code(),
                allowed ? grpc::StatusCode::INVALID_ARGUMENT : grpc::StatusCode::RESOURCE_EXHAUSTED);
      const std::string said =
          allowed
              ? "cannot be decoded"
              : absl::StrCat("has ", bytes, " bytes; at most 65536 are allowed (limits.max_message_bytes)");
      EXPECT_NE(status.error_message().find(said), std::string::npos) << status.error_message();
      EXPECT_EQ(answer, "");
    }
  }
  ExpectGoodRequestIsServed();
}

TEST_F(FrontEndTest, AnUnknownMethodIsNamed) {
  StartServer();
  const auto [status, answer] = CallRaw("/meshfill.v1.PrefillService/Prefil", {"whatever"});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(
      status.error_message(),
      "no method \"/meshfill.v1.PrefillService/Prefil\" here; call those of meshfill.v1.PrefillService, or "
      "grpc.health.v1.Health");
  ExpectGoodRequestIsServed();
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

TEST_F(FrontEndTest, NamesAreCountedInCharacters) {
  StartServer();
  const auto name = [](int characters) {
    std::string text;
    for (int i = 0; i < characters; ++i) text += "\xc3\xa9";
    return text;
  };
  v1::PrefillHeader header = Header(1);
  header.set_request_id(name(128));
  header.set_tenant(name(128));
  header.set_cache_salt(name(128));
  EXPECT_TRUE(Prefill(header, {1}).status.ok());
  header.set_tenant(name(129));
  const Reply reply = Prefill(header, {1});
  EXPECT_EQ(reply.status.message(), "tenant has 129 characters; at most 128 are allowed");
}

TEST_F(FrontEndTest, RefusesCompressedMessages) {
  StartServer();
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  auto stream = stub_->Prefill(&context);
  v1::PrefillRequest request;
  *request.mutable_header() = Header(200);
  request.mutable_header()->set_tenant(
      std::string(100, 'a'));  // compresses well, so that it is sent compressed
  stream->Write(request);
  stream->WritesDone();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  ExpectGoodRequestIsServed();
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

// ---- Cancel, disconnect, deadline.

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
  Call call(*stub_, absl::Milliseconds(200));
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

// ---- Full, draining, loading.

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
}

// ---- What else there is to ask.

TEST_F(FrontEndTest, ReflectionListsTheService) {
  StartServer();
  const auto [status, answer] =
      CallRaw(kReflection, {"\x3a\x01*"});  // ServerReflectionRequest.list_services = "*"
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_NE(answer.find("meshfill.v1.PrefillService"), std::string::npos);
  EXPECT_NE(answer.find("grpc.health.v1.Health"), std::string::npos);
}

TEST_F(FrontEndTest, PlanSaysWhatWouldRun) {
  StartServer();
  v1::PlanRequest request;
  request.set_token_count(1000);
  v1::PlanReply reply;
  grpc::ClientContext context;
  const grpc::Status status = stub_->Plan(&context, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.plan().a(), 2u);
  ASSERT_EQ(reply.steps_size(), 2);
  EXPECT_EQ(reply.steps(0).comm(), "q");
  EXPECT_EQ(reply.steps(1).comm(), "none");
  EXPECT_EQ(reply.steps(1).blocks(0).u(), 1u);
  EXPECT_DOUBLE_EQ(reply.predicted().seconds(), 0.001);
  ASSERT_EQ(reply.candidates_size(), 1);
  EXPECT_EQ(reply.candidates(0).b(), 2u);

  const std::vector<std::pair<std::function<void(v1::PlanRequest&)>, grpc::StatusCode>> bad = {
      {[](auto& r) { r.set_token_count(0); }, grpc::StatusCode::INVALID_ARGUMENT},
      {[](auto& r) { r.set_token_count(UINT64_MAX); }, grpc::StatusCode::OUT_OF_RANGE},
      {[](auto& r) { r.set_model("other"); }, grpc::StatusCode::NOT_FOUND},
      {[](auto& r) { r.mutable_plan()->mutable_tile(); }, grpc::StatusCode::INVALID_ARGUMENT},
  };
  for (const auto& [change, code] : bad) {
    v1::PlanRequest changed = request;
    change(changed);
    grpc::ClientContext bad_context;
    EXPECT_EQ(stub_->Plan(&bad_context, changed, &reply).error_code(), code);
  }
}

TEST_F(FrontEndTest, PoolSaysWhatRunsAndWaits) {
  StartServer();
  engine_->Hold(2);
  v1::PrefillHeader header = Header(3);
  header.set_request_id("running");
  header.set_tenant("team");
  Call running(*stub_), waiting(*stub_);
  running.Send(header).Send({1, 2, 3}).HalfClose();
  ASSERT_TRUE(engine_->WaitForBegun(1));
  waiting.Send(Header(2)).Send({2, 2}).HalfClose();
  EXPECT_TRUE(waiting.ReadEvent().has_accepted());
  ASSERT_TRUE(Eventually([&] { return GetPool().running_layers_done() == 2; }));
  const v1::PoolStatus pool = GetPool();
  EXPECT_EQ(pool.running_request_id(), "running");
  EXPECT_EQ(pool.running_layers(), 4u);
  EXPECT_EQ(pool.queued_requests(), 1u);
  EXPECT_EQ(pool.queued_tokens(), 2u);
  ASSERT_EQ(pool.requests_size(), 2);
  EXPECT_EQ(pool.requests(0).id(), "running");
  EXPECT_EQ(pool.requests(0).phase(), "running");
  EXPECT_EQ(pool.requests(0).tokens(), 3u);
  EXPECT_EQ(pool.requests(0).layers_done(), 2u);
  EXPECT_EQ(pool.requests(0).layers(), 4u);
  EXPECT_GT(pool.requests(0).elapsed_seconds(), 0);
  EXPECT_EQ(pool.requests(0).tenant(), "team");
  EXPECT_EQ(pool.requests(1).phase(), "waiting");
  EXPECT_EQ(pool.requests(1).tenant(), "");
  EXPECT_EQ(pool.requests(1).tokens(), 2u);
  EXPECT_GT(pool.requests(1).predicted_rest_seconds(), 0);
  EXPECT_EQ(pool.model(), "fake-model");
  EXPECT_EQ(pool.backend(), "fake/none");
  EXPECT_EQ(pool.ranks(), 4u);
  EXPECT_EQ(pool.vocab(), 256u);
  EXPECT_EQ(pool.context_tokens(), static_cast<uint64_t>(FakeEngine::kContext));
  EXPECT_TRUE(HasMetric("meshfill_queue_requests 1"));
  EXPECT_TRUE(HasMetric("meshfill_queue_tokens 2"));
  engine_->Release();
  EXPECT_TRUE(running.Finish().status.ok());
  EXPECT_TRUE(waiting.Finish().status.ok());
}

TEST_F(FrontEndTest, PoolSaysItsLinks) {
  StartServer();
  const v1::PoolStatus pool = GetPool();
  ASSERT_EQ(pool.links_size(), 1);
  EXPECT_EQ(pool.links(0).where(), "between hosts");
  EXPECT_EQ(pool.links(0).bytes_per_second(), 5e9);
  EXPECT_EQ(pool.links(0).latency_seconds(), 3e-6);
  EXPECT_EQ(pool.links(0).source(), "measured");
}

TEST_F(FrontEndTest, PortInUseIsSaid) {
  StartServer();
  const auto config = LoadConfig("", std::vector<std::string>{"listen=" + front_end_->address()});
  ASSERT_TRUE(config.ok());
  Metrics other_metrics;
  const auto other = FrontEnd::Start(*config, other_metrics);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(other.status().message()).find(front_end_->address()), std::string::npos)
      << other.status();
  EXPECT_NE(std::string(other.status().message()).find("in use"), std::string::npos) << other.status();
  ExpectGoodRequestIsServed();
}

}  // namespace
}  // namespace meshfill
