// The front-end's good way: a prompt's events and result, and what else there is to ask.
#include "server/api/front_end.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/api/front_end_fixture.h"

namespace meshfill {
namespace {

constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

using FrontEndTest = FrontEndFixture;

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
  Reply reply = Prefill(header, {1, 2, 3});
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.result->plan().a(), 1u);
  EXPECT_EQ(reply.result->plan().b(), 4u);
  EXPECT_EQ(reply.result->plan().heads(), 1u);
  EXPECT_EQ(reply.result->plan().layout(), v1::LAYOUT_ZIGZAG);
  header.mutable_plan()->mutable_tile()->set_b(2);
  header.mutable_plan()->set_heads(2);
  header.mutable_plan()->set_layout(v1::LAYOUT_STRIPED);
  header.mutable_plan()->set_stripe(2);
  reply = Prefill(header, {1, 2, 3});
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.result->plan().heads(), 2u);
  EXPECT_EQ(reply.result->plan().layout(), v1::LAYOUT_STRIPED);
  EXPECT_EQ(reply.result->plan().stripe(), 2u);
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
  request.set_token_count(0);
  grpc::ClientContext none;
  EXPECT_EQ(stub_->Plan(&none, request, &reply).error_message(),
            "token_count is 0; a prompt needs at least one token");
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
