// Leases, FetchKv and Cancel over gRPC, with an engine that computes nothing.
#include "server/api/kv_service.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <thread>

#include "kernels/monotonic_time.h"
#include "server/api/front_end.h"
#include "server/config/config.h"
#include "server/observe/log.h"
#include "server/queue/prefill_queue.h"
#include "server/queue/queue_room.h"
#include "server/queue/refusal.h"
#include "tests/server/api/kv_client.h"
#include "tests/server/captured_log.h"
#include "tests/server/eventually.h"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

class KvServiceTest : public testing::Test {
 protected:
  void StartServer(std::vector<std::string> overrides = {}) {
    overrides.insert(overrides.begin(), {"listen=127.0.0.1:0", "pool.embedded.ranks=4"});
    const auto config = LoadConfig("", overrides);
    ASSERT_TRUE(config.ok()) << config.status();
    auto front_end = FrontEnd::Start(*config, metrics_);
    ASSERT_TRUE(front_end.ok()) << front_end.status();
    front_end_ = *std::move(front_end);
    auto engine = std::make_unique<FakeEngine>();
    engine_ = engine.get();
    front_end_->Open(std::move(engine));
    client_ = std::make_unique<KvClient>(Channel());
  }
  void TearDown() override {
    if (front_end_ != nullptr) front_end_->Stop();
  }

  std::shared_ptr<grpc::Channel> Channel() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    return grpc::CreateCustomChannel(front_end_->address(), grpc::InsecureChannelCredentials(), arguments);
  }

  v1::PrefillResult Prefill(size_t tokens, uint32_t lease_seconds = 0) {
    v1::PrefillHeader header = client_->Header(tokens);
    header.mutable_kv()->set_lease_seconds(lease_seconds);
    const auto result = client_->Prefill(header, std::vector<uint32_t>(tokens, 7));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : v1::PrefillResult();
  }

  v1::FetchKvRequest Request(const std::string& lease) const {
    v1::FetchKvRequest request;
    request.set_lease(lease);
    return request;
  }

  KvShape Shape() const { return KvShapeOf(engine_->model()); }

  // All of the fetched layers are the engine's values.
  void ExpectValues(const Fetched& fetched, const KvRange& range, int first_layer, int layers,
                    KvFormat format = KvFormat::kTokens, int64_t page_tokens = 1) {
    ASSERT_TRUE(fetched.status.ok()) << fetched.status;
    ASSERT_EQ(fetched.k.size(), static_cast<size_t>(layers));
    for (int layer = 0; layer < layers; ++layer) {
      const std::string bytes = fetched.k[layer] + fetched.v[layer] + fetched.pages[layer];
      const std::vector<std::byte> expected =
          KvBytes(Shape(), first_layer + layer, range, format, page_tokens);
      ASSERT_EQ(bytes.size(), expected.size());
      ASSERT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0) << "layer " << layer;
    }
  }

  // True as soon as the condition holds; false after 10 s.
  bool EventuallyHasMetric(const std::string& line) {
    return Eventually([&] { return metrics_.Text().find(line + "\n") != std::string::npos; });
  }

  Metrics metrics_;
  std::unique_ptr<FrontEnd> front_end_;
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<KvClient> client_;
};

TEST_F(KvServiceTest, AResultSaysWhatIsKept) {
  StartServer({"kv.block_tokens=4"});
  const v1::PrefillResult result = Prefill(21);
  const v1::KvManifest& kv = result.kv();
  EXPECT_EQ(kv.lease().size(), 32u);
  EXPECT_GT(kv.expires_in_seconds(), 29);
  EXPECT_LE(kv.expires_in_seconds(), 30);
  EXPECT_EQ(kv.tokens(), 21u);
  EXPECT_EQ(kv.layers(), 4u);
  EXPECT_EQ(kv.kv_heads(), 2u);
  EXPECT_EQ(kv.head_dim(), 8u);
  EXPECT_EQ(kv.dtype(), "f32");
  EXPECT_EQ(kv.bytes(), 4u * 2 * 21 * 2 * 8 * 4);
  EXPECT_EQ(kv.block_tokens(), 4u);
  EXPECT_EQ(kv.block_hashes().size(), 5u * 32);
  ASSERT_EQ(kv.holders_size(), 1);
  EXPECT_EQ(kv.holders(0).address(), "");
  EXPECT_EQ(kv.holders(0).layers(), 4u);
  EXPECT_EQ(kv.holders(0).heads(), 2u);
  EXPECT_EQ(kv.holders(0).run_tokens(), 21u);
  EXPECT_EQ(kv.holders(0).step_tokens(), 0u);
  EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_leases 1"));
  EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_bytes " + std::to_string(kv.bytes())));

  v1::PrefillHeader other = client_->Header(21);
  other.clear_kv();
  EXPECT_FALSE(client_->Prefill(other, std::vector<uint32_t>(21, 7))->has_kv());
  v1::PrefillHeader salted = client_->Header(21);
  salted.set_cache_salt("salt");
  EXPECT_NE(client_->Prefill(salted, std::vector<uint32_t>(21, 7))->kv().block_hashes(), kv.block_hashes());
  salted.set_cache_salt(std::string(129, 's'));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->Prefill(salted, std::vector<uint32_t>(21, 7)).status()));
}

TEST_F(KvServiceTest, AnyRangeIsFetchedInAnyLayout) {
  StartServer();
  std::mt19937_64 random(TestSeed());
  const int64_t tokens = 300;
  const std::string lease = Prefill(tokens).kv().lease();
  size_t bytes = 0;
  for (int round = 0; round < 100; ++round) {
    KvRange range;
    range.first_head = Draw<int>(random, 0, 1);
    range.heads = Draw<int>(random, 1, 2 - range.first_head);
    range.first_token = Draw<int64_t>(random, 0, tokens - 1);
    range.tokens = Draw<int64_t>(random, 1, tokens - range.first_token);
    const int first_layer = Draw<int>(random, 0, 3);
    const int layers = Draw<int>(random, 1, 4 - first_layer);
    const auto format = static_cast<KvFormat>(Draw<int>(random, 0, 2));
    const int64_t page_tokens = Draw<int>(random, 1, 64);
    v1::FetchKvRequest request = Request(lease);
    if (format != KvFormat::kTokens) {
      range.first_token -= range.first_token % page_tokens;
      range.tokens = std::min(tokens - range.first_token, (range.tokens / page_tokens + 1) * page_tokens);
      request.set_page_tokens(static_cast<uint32_t>(page_tokens));
    }
    request.set_layout(static_cast<v1::KvLayout>(format));
    request.set_first_token(static_cast<uint64_t>(range.first_token));
    request.set_tokens(static_cast<uint64_t>(range.tokens));
    request.set_first_head(static_cast<uint32_t>(range.first_head));
    request.set_heads(static_cast<uint32_t>(range.heads));
    request.set_first_layer(static_cast<uint32_t>(first_layer));
    request.set_layers(static_cast<uint32_t>(layers));
    const Fetched fetched = client_->Fetch(request);
    ExpectValues(fetched, range, first_layer, layers, format, page_tokens);
    if (HasFatalFailure()) FAIL() << "round " << round;
    for (int layer = 0; layer < layers; ++layer) {
      bytes += fetched.k[layer].size() + fetched.v[layer].size() + fetched.pages[layer].size();
    }
  }
  EXPECT_TRUE(EventuallyHasMetric(absl::StrCat("meshfill_kv_fetched_bytes_total ", bytes)));
}

TEST_F(KvServiceTest, LayersComeWhileLaterOnesCompute) {
  StartServer();
  engine_->Hold(0);
  const auto context = client_->Context();
  const auto prefill = client_->stub().Prefill(context.get());
  v1::PrefillRequest request;
  *request.mutable_header() = client_->Header(100);
  prefill->Write(request);
  *request.mutable_tokens()->mutable_ids() = {};
  for (int i = 0; i < 100; ++i) request.mutable_tokens()->add_ids(i);
  prefill->Write(request);
  prefill->WritesDone();
  v1::PrefillEvent event;
  ASSERT_TRUE(prefill->Read(&event));
  const std::string lease = event.accepted().kv_lease();
  ASSERT_FALSE(lease.empty());

  const auto fetch_context = client_->Context();
  const auto fetch = client_->stub().FetchKv(fetch_context.get(), Request(lease));
  v1::KvPart part;
  for (int layer = 0; layer < 4; ++layer) {
    engine_->Hold(layer + 1);  // this layer may compute, the next one not
    ASSERT_TRUE(fetch->Read(&part));
    EXPECT_EQ(part.layer(), static_cast<uint32_t>(layer));
  }
  EXPECT_FALSE(fetch->Read(&part));
  EXPECT_TRUE(fetch->Finish().ok());
  engine_->Release();
  while (prefill->Read(&event)) {
    if (event.has_progress()) continue;
    EXPECT_EQ(event.result().kv().lease(), lease);
  }
  EXPECT_TRUE(prefill->Finish().ok());
}

TEST_F(KvServiceTest, RefusesRangesOutsideAndServesTheNextGoodOne) {
  StartServer();
  const std::string lease = Prefill(100).kv().lease();
  const std::function<void(v1::FetchKvRequest&)> bad[] = {
      [](auto& r) { r.set_first_token(100); },
      [](auto& r) { r.set_tokens(101); },
      [](auto& r) { r.set_first_layer(4); },
      [](auto& r) { r.set_heads(3); },
      [](auto& r) { r.set_page_tokens(16); },
      [](auto& r) { r.set_layout(v1::KV_LAYOUT_PAGES_NHD); },
      [](auto& r) {
        r.set_layout(v1::KV_LAYOUT_PAGES_HND);
        r.set_page_tokens(16);
        r.set_first_token(20);
      },
  };
  for (const auto& change : bad) {
    v1::FetchKvRequest request = Request(lease);
    change(request);
    const Fetched fetched = client_->Fetch(request);
    EXPECT_TRUE(absl::IsInvalidArgument(fetched.status)) << fetched.status;
    EXPECT_EQ(fetched.parts, 0);
    ExpectValues(client_->Fetch(Request(lease)), {.tokens = 100, .heads = 2}, 0, 4);
  }
}

TEST_F(KvServiceTest, LeasesAreRenewedReleasedAndLapse) {
  StartServer({"kv.lease=1s", "kv.max_lease=100s"});
  const std::string lease = Prefill(10).kv().lease();
  EXPECT_EQ(*client_->Renew(lease, 50), 50);
  EXPECT_EQ(*client_->Renew(lease, 5000), 100);
  EXPECT_EQ(*client_->Renew(lease, 0), 1);
  EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_leases_lapsed_total 1"));
  EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request(lease)).status));
  EXPECT_TRUE(absl::IsNotFound(client_->Renew(lease, 1).status()));
  EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_bytes 0"));

  const std::string other = Prefill(10, 60).kv().lease();
  EXPECT_TRUE(client_->Fetch(Request(other)).status.ok());
  EXPECT_TRUE(client_->Release(other).ok());
  EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request(other)).status));
  EXPECT_TRUE(client_->Release(other).ok());
  EXPECT_TRUE(client_->Release("unknown").ok());
  EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request("unknown")).status));
  EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_leases 0"));
}

TEST_F(KvServiceTest, ATenantReadsItsOwnLeasesAlone) {
  StartServer();
  KvClient mine(Channel(), "me"), other(Channel(), "other");
  const auto result = mine.Prefill(mine.Header(10), std::vector<uint32_t>(10, 1));
  ASSERT_TRUE(result.ok()) << result.status();
  const std::string lease = result->kv().lease();
  for (KvClient* stranger : {&other, client_.get()}) {
    EXPECT_TRUE(absl::IsNotFound(stranger->Fetch(Request(lease)).status));
    EXPECT_TRUE(absl::IsNotFound(stranger->Renew(lease, 1).status()));
    EXPECT_TRUE(stranger->Release(lease).ok());  // and does nothing
  }
  EXPECT_TRUE(mine.Fetch(Request(lease)).status.ok());
}

TEST_F(KvServiceTest, RefusesWhatHasNoRoomBeforeItComputes) {
  StartServer();
  const auto tokens = static_cast<size_t>(FakeEngine::kKvBytes / Shape().LayerBytes(1) / Shape().layers);
  // Two prompts that do not fit together, and one that never will.
  v1::PrefillHeader header = client_->Header(tokens + 1);
  auto refused = client_->Prefill(header, std::vector<uint32_t>(tokens + 1, 1));
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_EQ(RetryAfter(refused.status()), std::nullopt);

  const std::string lease = Prefill(1000, 20).kv().lease();
  refused = client_->Prefill(header, std::vector<uint32_t>(tokens, 1));
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  ASSERT_TRUE(RetryAfter(refused.status()).has_value());
  EXPECT_LE(*RetryAfter(refused.status()), absl::Seconds(20));
  EXPECT_GT(*RetryAfter(refused.status()), absl::Seconds(10));
  // Each is counted before it is answered, whatever else has changed.
  for (const char* count : {"\nmeshfill_kv_refused_total 3\n", "\nmeshfill_kv_refused_total 4\n"}) {
    EXPECT_FALSE(client_->Prefill(header, std::vector<uint32_t>(tokens, 1)).ok());
    EXPECT_NE(metrics_.Text().find(count), std::string::npos) << count;
  }
  EXPECT_EQ(engine_->finished_runs(), 1);
  EXPECT_TRUE(client_->Release(lease).ok());
  Prefill(1000);
}

TEST_F(KvServiceTest, ALongPromptTakesItsRoomWhenHalfOfItHasCome) {
  StartServer();
  const auto tokens = static_cast<size_t>(FakeEngine::kKvBytes / Shape().LayerBytes(1) / Shape().layers);
  ASSERT_GT(tokens, static_cast<size_t>(QueueRoom::kFreeTokens));
  for (const bool room_is_left : {true, false}) {
    const auto context = client_->Context();
    const auto upload = client_->stub().Prefill(context.get());
    v1::PrefillRequest request;
    *request.mutable_header() = client_->Header(tokens);  // all the room
    upload->Write(request);
    const auto write = [&](size_t count) {
      request.mutable_tokens()->mutable_ids()->Clear();
      request.mutable_tokens()->mutable_ids()->Resize(static_cast<int>(count), 1);
      upload->Write(request);
    };
    write(tokens / 2 - 1);
    ASSERT_TRUE(EventuallyHasMetric("meshfill_queue_requests 1"));
    const std::string lease = Prefill(1000, 20).kv().lease();  // announcing alone takes none of it
    if (room_is_left) {
      EXPECT_TRUE(client_->Release(lease).ok());
      EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_bytes 0"));  // its run has let go of it, too
    }
    write(1);
    if (room_is_left) {
      EXPECT_TRUE(
          Eventually([&] { return metrics_.Text().find("\nmeshfill_kv_bytes 0\n") == std::string::npos; }));
      const auto refused = client_->Prefill(client_->Header(1000), std::vector<uint32_t>(1000, 1));
      EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
      write(tokens - tokens / 2);
      upload->WritesDone();
    }
    v1::PrefillEvent event;
    while (upload->Read(&event)) {
    }
    const absl::Status status = FromGrpcStatus(upload->Finish());
    if (room_is_left) {
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(client_->Release(event.result().kv().lease()).ok());
      EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_bytes 0"));
    } else {
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      EXPECT_TRUE(RetryAfter(status).has_value());
    }
  }
}

TEST_F(KvServiceTest, ATenantKeepsNoMoreThanItMay) {
  const KvShape shape = KvShapeOf(FakeEngine().model());
  const int64_t token_bytes = shape.LayerBytes(1) * shape.layers;
  StartServer({absl::StrCat("tenants.small.max_kv_bytes=", 100 * token_bytes, "B")});
  v1::PrefillHeader header = client_->Header(0);
  header.set_tenant("small");
  header.mutable_kv()->set_lease_seconds(20);
  KvClient small(Channel(), "small");
  const auto prefill = [&](size_t tokens) {
    header.set_token_count(tokens);
    return small.Prefill(header, std::vector<uint32_t>(tokens, 7));
  };
  auto refused = prefill(101);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_EQ(RetryAfter(refused.status()), std::nullopt);
  const auto kept = prefill(60);
  ASSERT_TRUE(kept.ok()) << kept.status();
  refused = prefill(41);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  ASSERT_TRUE(RetryAfter(refused.status()).has_value());
  EXPECT_LE(*RetryAfter(refused.status()), absl::Seconds(20));
  EXPECT_GT(*RetryAfter(refused.status()), absl::Seconds(10));
  EXPECT_TRUE(prefill(40).ok());
  Prefill(1000);  // of another tenant
  EXPECT_TRUE(small.Release(kept->kv().lease()).ok());
  EXPECT_TRUE(prefill(60).ok());
  EXPECT_TRUE(EventuallyHasMetric("meshfill_requests_refused_total{reason=\"tenant_share\"} 2"));
}

// Who is refused hears when the first lease that makes room ends.
TEST_F(KvServiceTest, ATenantWaitsForTheLeaseThatEndsFirst) {
  const KvShape shape = KvShapeOf(FakeEngine().model());
  StartServer({absl::StrCat("tenant_limits.max_kv_bytes=", 100 * shape.LayerBytes(1) * shape.layers, "B")});
  Prefill(40, 200);
  Prefill(60, 20);
  const auto refused = client_->Prefill(client_->Header(40), std::vector<uint32_t>(40, 7));
  ASSERT_TRUE(RetryAfter(refused.status()).has_value()) << refused.status();
  EXPECT_LE(*RetryAfter(refused.status()), absl::Seconds(20));
  const auto larger = client_->Prefill(client_->Header(80), std::vector<uint32_t>(80, 7));
  ASSERT_TRUE(RetryAfter(larger.status()).has_value()) << larger.status();
  EXPECT_GT(*RetryAfter(larger.status()), absl::Seconds(100)) << "that takes both";
}

// Who knows a lease may read what is kept under it, and others may read the log.
TEST_F(KvServiceTest, TheLogHasTheBeginOfALeaseAlone) {
  StartServer();
  const v1::PrefillResult kept = Prefill(10);
  FlushLog();
  testing::internal::CaptureStderr();
  EXPECT_TRUE(client_->Fetch(Request(kept.kv().lease())).status.ok());
  FlushLog();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(absl::StrCat("fetch lease=\"", kept.kv().lease().substr(0, 8), "\"")), std::string::npos)
      << log;
  EXPECT_EQ(log.find(kept.kv().lease()), std::string::npos) << log;
  EXPECT_NE(log.find(absl::StrCat("bytes=", kept.kv().bytes())), std::string::npos) << log;
  EXPECT_TRUE(EventuallyHasMetric(absl::StrCat("meshfill_kv_fetched_bytes_total ", kept.kv().bytes())));
}

// Who asks for leases that are not there fills no log: each second has 50 of its lines, and the count.
TEST_F(KvServiceTest, TheLogHasAFewOfManyRefusedFetches) {
  StartServer();
  FlushLog();
  testing::internal::CaptureStderr();
  const absl::Time begin = MonotonicNow();
  for (int i = 0; i < 500; ++i) {
    EXPECT_TRUE(absl::IsNotFound(client_->Fetch(Request("no lease")).status));
  }
  const absl::Duration seconds = MonotonicNow() - begin;
  FlushLog();
  const std::string log = testing::internal::GetCapturedStderr();
  int lines = 0;
  for (size_t at = 0; (at = log.find("code=NOT_FOUND", at)) != std::string::npos; ++at) ++lines;
  EXPECT_GT(lines, 0);  // others may have refused in the same second
  EXPECT_LE(lines, 50 * (2 + absl::ToInt64Seconds(seconds)));
}

TEST_F(KvServiceTest, AFailedOrCancelledPrefillEndsItsLeaseAndItsReaders) {
  StartServer();
  for (const bool cancelled : {false, true}) {
    engine_->Hold(2);
    const auto context = client_->Context();
    const auto prefill = client_->stub().Prefill(context.get());
    v1::PrefillRequest request;
    *request.mutable_header() = client_->Header(3);
    prefill->Write(request);
    for (const uint32_t id : {1, 2, 3}) request.mutable_tokens()->add_ids(id);
    prefill->Write(request);
    prefill->WritesDone();
    v1::PrefillEvent event;
    ASSERT_TRUE(prefill->Read(&event));
    const auto fetch_context = client_->Context();
    const auto fetch = client_->stub().FetchKv(fetch_context.get(), Request(event.accepted().kv_lease()));
    v1::KvPart part;
    EXPECT_TRUE(fetch->Read(&part));
    EXPECT_TRUE(fetch->Read(&part));
    if (cancelled) {
      engine_->HoldStopped();
      EXPECT_TRUE(client_->Cancel(event.accepted().request_id()).ok());
      // At once, though the engine still has the prompt.
      EXPECT_TRUE(absl::IsNotFound(client_->Renew(event.accepted().kv_lease(), 1).status()));
    } else {
      engine_->FailNext(absl::InternalError("NaN in the logits"));
      // Two layers may be read meanwhile, or not.
    }
    engine_->Release();
    while (fetch->Read(&part)) {
    }
    const grpc::Status status = fetch->Finish();
    if (cancelled) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND) << status.error_message();
    }
    while (prefill->Read(&event)) {
    }
    EXPECT_EQ(prefill->Finish().error_code(),
              cancelled ? grpc::StatusCode::CANCELLED : grpc::StatusCode::INTERNAL);
    EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_leases 0"));
    EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_bytes 0"));
  }
  EXPECT_TRUE(EventuallyHasMetric("meshfill_calls_refused_total{call=\"FetchKv\",code=\"NOT_FOUND\"} 0"))
      << "they were served while there was something to read";
  Prefill(10);
}

TEST_F(KvServiceTest, CancelEndsWhatUploadsWaitsOrRuns) {
  StartServer();
  engine_->Hold();
  KvClient mine(Channel(), "me");
  struct Live {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::PrefillRequest, v1::PrefillEvent>> stream;
  };
  std::vector<Live> live;
  for (const char* id : {"running", "waiting", "uploading"}) {
    live.push_back({mine.Context(), nullptr});
    auto& stream = live.back().stream = mine.stub().Prefill(live.back().context.get());
    v1::PrefillRequest request;
    *request.mutable_header() = mine.Header(2);
    request.mutable_header()->set_request_id(id);
    stream->Write(request);
    request.mutable_tokens()->add_ids(1);
    request.mutable_tokens()->add_ids(2);
    if (std::string(id) == "uploading") request.mutable_tokens()->mutable_ids()->RemoveLast();
    stream->Write(request);
    if (std::string(id) == "uploading") continue;
    stream->WritesDone();
    v1::PrefillEvent event;
    ASSERT_TRUE(stream->Read(&event));
  }
  ASSERT_TRUE(engine_->WaitForBegun(1));
  KvClient other(Channel(), "other");
  EXPECT_TRUE(absl::IsNotFound(other.Cancel("running")));
  EXPECT_TRUE(absl::IsNotFound(mine.Cancel("unknown")));
  EXPECT_TRUE(absl::IsNotFound(mine.Cancel("")));
  const char* const ids[] = {"running", "waiting", "uploading"};
  for (const int index : {2, 1, 0}) {
    // Where no credentials are asked for, whoever names no tenant may cancel everybody's.
    KvClient& who = index == 1 ? *client_ : mine;
    ASSERT_TRUE(Eventually([&] { return who.Cancel(ids[index]).ok(); })) << ids[index];
    v1::PrefillEvent event;
    while (live[index].stream->Read(&event)) EXPECT_FALSE(event.has_result());
    EXPECT_EQ(live[index].stream->Finish().error_code(), grpc::StatusCode::CANCELLED) << ids[index];
    EXPECT_TRUE(absl::IsNotFound(mine.Cancel(ids[index])));
  }
  EXPECT_TRUE(engine_->WaitForStopped(1));
  engine_->Release();
  Prefill(10);
}

TEST_F(KvServiceTest, DrainServesLiveLeasesAndWaitsForTheirEnd) {
  StartServer();
  const std::string lease = Prefill(10, 600).kv().lease();
  front_end_->StartDrain();
  EXPECT_TRUE(
      absl::IsUnavailable(client_->Prefill(client_->Header(1), std::vector<uint32_t>(1, 1)).status()));
  EXPECT_FALSE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Milliseconds(50)));
  EXPECT_TRUE(client_->Fetch(Request(lease)).status.ok());
  EXPECT_TRUE(client_->Renew(lease, 500).ok());
  EXPECT_TRUE(client_->Release(lease).ok());
  EXPECT_TRUE(front_end_->WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * 4096;
}

TEST_F(KvServiceTest, AHundredSlowReadersCostAPartEach) {
  StartServer();
  constexpr int kReaders = 100;
  constexpr size_t kTokens = 60'000;  // 30 MB, 30 parts
  const v1::PrefillResult result = Prefill(kTokens, 600);
  const std::string& lease = result.kv().lease();
  struct Reader {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::ClientReader<v1::KvPart>> stream;
  };
  const int64_t before = ResidentBytes();
  std::vector<KvClient> clients;  // connections of their own: the window of one is shared
  std::vector<Reader> readers;
  for (int i = 0; i < kReaders; ++i) {
    clients.emplace_back(Channel());
    auto context = clients.back().Context();
    auto stream = clients.back().stub().FetchKv(context.get(), Request(lease));
    readers.push_back({std::move(context), std::move(stream)});
  }
  v1::KvPart part;
  for (Reader& reader : readers) ASSERT_TRUE(reader.stream->Read(&part));
  absl::SleepFor(absl::Milliseconds(300));
  // A part in the stream, its copy in gRPC, and what client and connection hold, for each.
  int64_t most = int64_t{kReaders} * (8 << 20);
#if defined(__SANITIZE_ADDRESS__)
  most += int64_t{256} << 20;  // AddressSanitizer keeps so much of what is free
#endif
  EXPECT_LT(ResidentBytes() - before, most);
  ExpectValues(client_->Fetch(Request(lease)), {.tokens = kTokens, .heads = 2}, 0,
               4);  // nobody waits for them

  // Some read on to the end of the lease, some die.
  for (int i = 0; i < kReaders / 2; ++i) readers[i].context->TryCancel();
  EXPECT_TRUE(client_->Release(lease).ok());
  for (int i = 0; i < kReaders; ++i) {
    int parts = 1;
    while (readers[i].stream->Read(&part)) ++parts;
    EXPECT_LT(parts, 28);
    const auto code = readers[i].stream->Finish().error_code();
    EXPECT_EQ(code, i < kReaders / 2 ? grpc::StatusCode::CANCELLED : grpc::StatusCode::NOT_FOUND);
  }
  EXPECT_TRUE(EventuallyHasMetric("meshfill_kv_bytes 0"));
  Prefill(10);
}

// Not before its time: the newest part of all may be of any size.
TEST_F(KvServiceTest, AReaderWhoStandsStillIsEnded) {
  StartServer({"limits.result_timeout=2500ms", "limits.unread_bytes=1B"});
  constexpr size_t kTokens = 60'000;  // 30 MB: more than connections hold
  const v1::PrefillResult result = Prefill(kTokens, 600);
  const std::string& lease = result.kv().lease();
  const CapturedLog log;
  const auto context = client_->Context();
  const auto stream = client_->stub().FetchKv(context.get(), Request(lease));
  v1::KvPart part;
  ASSERT_TRUE(stream->Read(&part));
  ASSERT_TRUE(Eventually([&] { return log.CountOf("its reader stood still") > 0; })) << log.Text();
  int parts = 1;
  while (stream->Read(&part)) ++parts;
  EXPECT_LT(parts, 28);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ExpectValues(client_->Fetch(Request(lease)), {.tokens = kTokens, .heads = 2}, 0, 4);
}

// Each part has its time, not all of them together.
TEST_F(KvServiceTest, AReaderWhoIsSlowIsServed) {
  StartServer({"limits.result_timeout=1500ms"});
  constexpr size_t kTokens = 120'000;  // 60 MB in parts of 1 MiB: more than connections hold
  const v1::PrefillResult result = Prefill(kTokens, 600);
  const auto context = client_->Context();
  const auto stream = client_->stub().FetchKv(context.get(), Request(result.kv().lease()));
  const absl::Time begin = MonotonicNow();
  for (v1::KvPart part; stream->Read(&part);) absl::SleepFor(absl::Milliseconds(60));
  EXPECT_GT(MonotonicNow() - begin, absl::Milliseconds(1500));
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Who has stood still for longest goes first; who reads on is served.
TEST_F(KvServiceTest, ReadersWhoStandStillTakeNoMoreThanTheirBound) {
  StartServer({"limits.unread_bytes=4MiB", "limits.result_timeout=1h"});
  constexpr size_t kTokens = 60'000;  // 30 MB in parts of 1 MiB: more than connections hold
  constexpr int kReaders = 8;
  const v1::PrefillResult result = Prefill(kTokens, 600);
  const std::string& lease = result.kv().lease();
  struct Reader {
    explicit Reader(const std::shared_ptr<grpc::Channel>& channel) : client(channel) {}
    KvClient client;
    std::unique_ptr<grpc::ClientContext> context = client.Context();
    std::unique_ptr<grpc::ClientReader<v1::KvPart>> stream;
    v1::KvPart part;
  };
  const CapturedLog log;
  std::vector<std::unique_ptr<Reader>> readers;
  for (int i = 0; i < kReaders; ++i) {
    readers.push_back(std::make_unique<Reader>(Channel()));  // the window of a connection is shared
    Reader& reader = *readers.back();
    reader.stream = reader.client.stub().FetchKv(reader.context.get(), Request(lease));
    ASSERT_TRUE(reader.stream->Read(&reader.part));
    absl::SleepFor(absl::Milliseconds(200));  // until its next ones fill the windows
  }
  ASSERT_TRUE(Eventually([&] { return log.CountOf("its part has waited longest") >= kReaders - 4; }))
      << log.Text();
  ExpectValues(client_->Fetch(Request(lease)), {.tokens = kTokens, .heads = 2}, 0, 4);
  std::vector<bool> ok;
  for (const auto& reader : readers) {
    while (reader->stream->Read(&reader->part)) {
    }
    const auto code = reader->stream->Finish().error_code();
    EXPECT_TRUE(code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED) << code;
    ok.push_back(code == grpc::StatusCode::OK);
  }
  EXPECT_FALSE(ok.front());
  EXPECT_TRUE(ok.back());
  EXPECT_LE(std::count(ok.begin(), ok.end(), true), 4);
}

TEST_F(KvServiceTest, StopEndsWhoWaitsForALayer) {
  StartServer();
  engine_->Hold(1);
  const auto context = client_->Context();
  const auto prefill = client_->stub().Prefill(context.get());
  v1::PrefillRequest request;
  *request.mutable_header() = client_->Header(1);
  prefill->Write(request);
  request.mutable_tokens()->add_ids(1);
  prefill->Write(request);
  prefill->WritesDone();
  v1::PrefillEvent event;
  ASSERT_TRUE(prefill->Read(&event));
  std::thread reader(
      [&, lease = event.accepted().kv_lease()] { EXPECT_FALSE(client_->Fetch(Request(lease)).status.ok()); });
  absl::SleepFor(absl::Milliseconds(50));
  front_end_->Stop();
  reader.join();
  while (prefill->Read(&event)) {
  }
  EXPECT_FALSE(prefill->Finish().ok());
}

}  // namespace
}  // namespace meshfill
