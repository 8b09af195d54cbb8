#include "server/pool/worker/holder_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/config/address.h"
#include "server/config/config.h"
#include "server/pool/holder_call.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/captured_log.h"
#include "tests/server/eventually.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

// Holds nothing.
class NoKv final : public KvSource {
 public:
  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest&, const std::string&, int64_t,
                                                 std::function<void()>) override {
    return absl::NotFoundError("nothing is held here");
  }
  absl::Time EndLapsed() override { return absl::InfiniteFuture(); }
  KvStore::Counts counts() const override { return {}; }
  void SetObserver(std::function<void()>) override {}
};

// Has one lease, of parts without end.
class EndlessKv final : public KvSource {
 public:
  explicit EndlessKv(int64_t held_bytes = 0) : held_bytes_(held_bytes) {}  // by each reader

  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest&, const std::string&, int64_t,
                                                 std::function<void()>) override {
    ++opened;
    if (!lives) return absl::NotFoundError("the lease has ended");
    return std::make_unique<Reader>(held_bytes_);
  }
  absl::Time EndLapsed() override { return absl::InfiniteFuture(); }
  KvStore::Counts counts() const override { return {}; }
  void SetObserver(std::function<void()>) override {}

  std::atomic<bool> lives = true;
  std::atomic<int> opened = 0;

 private:
  class Reader final : public KvReader {
   public:
    explicit Reader(int64_t held_bytes) : held_bytes_(held_bytes) {}
    absl::StatusOr<Next> Take(v1::KvPart& part) override {
      part.set_k(std::string(1 << 20, 'k'));
      return Next::kPart;
    }
    int64_t held_bytes() const override { return held_bytes_; }

   private:
    const int64_t held_bytes_;
  };
  const int64_t held_bytes_;
};

// The health of a service: 1 SERVING, 2 NOT_SERVING (grpc.health.v1); -1: an error.
int Health(const std::string& address, const std::string& service) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const grpc::Slice name("\n" + std::string(1, static_cast<char>(service.size())) + service);
  grpc::CompletionQueue queue;
  auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::ByteBuffer(&name, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> parts;
  if (!status.ok() || !answer.Dump(&parts).ok() || parts.size() != 1 || parts[0].size() != 2) return -1;
  return parts[0].begin()[0] == 8 ? parts[0].begin()[1] : -1;
}

v1::Config Defaults() { return LoadConfig("").value(); }

// How a FetchKv call ends.
absl::Status Fetch(HolderChannels& channels, const std::string& address, const std::string& tenant = "") {
  const auto call = channels.Fetch(address, {}, tenant, [] {});
  for (int i = 0; i < 2000 && !call->end().has_value(); ++i) absl::SleepFor(absl::Milliseconds(5));
  return call->end().value_or(absl::DeadlineExceededError("nothing came"));
}

// How one ends that a new front-end makes, protected as `api` says.
absl::Status Fetch(const std::string& address, const v1::ApiSection& api, const std::string& tenant = "") {
  const auto channels = HolderChannels::Make(api);
  return channels.ok() ? Fetch(**channels, address, tenant) : channels.status();
}

// Certificates for kv.listen of a worker whose name is "worker.pool", and for its front-end's connections.
TEST(HolderService, TheFrontEndReadsOverTls) {
  const TestCertificates pool, others;
  v1::Config worker = Defaults();
  *worker.mutable_api()->mutable_tls() = pool.Tls("worker.pool");
  worker.mutable_api()->mutable_tls()->set_client_certificates(true);
  NoKv held;
  const auto service = HolderService::Start("127.0.0.1:0", worker, held);
  ASSERT_TRUE(service.ok()) << service.status();
  const std::string& address = (*service)->address();

  v1::ApiSection api;
  *api.mutable_tls() = pool.Tls("front-end.pool");
  api.mutable_tls()->set_client_certificates(true);
  api.mutable_tls()->set_server_name("worker.pool");
  EXPECT_EQ(Fetch(address, api), absl::NotFoundError("nothing is held here"));

  v1::ApiSection wrong_name = api;
  wrong_name.mutable_tls()->set_server_name("another.pool");
  EXPECT_TRUE(absl::IsUnavailable(Fetch(address, wrong_name)));
  v1::ApiSection no_name = api;
  no_name.mutable_tls()->clear_server_name();
  EXPECT_TRUE(absl::IsUnavailable(Fetch(address, no_name))) << "the certificate has no 127.0.0.1";
  v1::ApiSection no_certificate = api;
  no_certificate.mutable_tls()->set_client_certificates(false);
  EXPECT_TRUE(absl::IsUnavailable(Fetch(address, no_certificate)));
  v1::ApiSection stranger = api;
  *stranger.mutable_tls() = others.Tls("front-end.pool");
  stranger.mutable_tls()->set_ca(api.tls().ca());
  stranger.mutable_tls()->set_client_certificates(true);
  stranger.mutable_tls()->set_server_name("worker.pool");
  EXPECT_TRUE(absl::IsUnavailable(Fetch(address, stranger)));
  EXPECT_TRUE(absl::IsUnavailable(Fetch(address, {}))) << "plain text";
  stranger.mutable_tls()->set_cert("/nowhere.pem");
  EXPECT_TRUE(absl::IsInvalidArgument(Fetch(address, stranger)));
}

// Of a worker, whose token is "abc", and of a client of tenant a, whose token is "test".
v1::Config WithCredentials(const TestCertificates& files) {
  v1::Config config = Defaults();
  config.mutable_api()->set_credentials(files.Write(
      "credentials",
      "pool worker - sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n"
      "alice client a sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n"));
  return config;
}

TEST(HolderService, AsksForCredentials) {
  const TestCertificates files;
  const v1::Config config = WithCredentials(files);
  NoKv held;
  const auto service = HolderService::Start("127.0.0.1:0", config, held);
  ASSERT_TRUE(service.ok()) << service.status();
  const std::string& address = (*service)->address();
  v1::ApiSection api;
  EXPECT_TRUE(absl::IsUnauthenticated(Fetch(address, api)));
  api.set_token(files.Write("token", "abc\n"));
  EXPECT_TRUE(absl::IsNotFound(Fetch(address, api, "any")));
  api.set_token(files.Write("token", "  test\n"));
  EXPECT_TRUE(absl::IsNotFound(Fetch(address, api, "a")));
  EXPECT_TRUE(absl::IsPermissionDenied(Fetch(address, api, "b")));
  api.set_token(files.Write("token", "tset"));
  EXPECT_TRUE(absl::IsUnauthenticated(Fetch(address, api)));
  for (const char* bad : {"", " \n", "two words", "two\nlines"}) {
    api.set_token(files.Write("token", bad));
    EXPECT_TRUE(absl::IsInvalidArgument(Fetch(address, api))) << bad;
  }
  EXPECT_EQ(Health(address, ""), 1) << "for everybody";
}

// A front-end takes a renewed token over while it runs. A file without one changes nothing.
TEST(HolderService, ARenewedTokenCountsAndABadOneDoesNot) {
  const TestCertificates files;
  const v1::Config config = WithCredentials(files);
  NoKv held;
  const auto service = HolderService::Start("127.0.0.1:0", config, held);
  ASSERT_TRUE(service.ok()) << service.status();
  const std::string& address = (*service)->address();
  v1::ApiSection api;
  api.set_token(files.Write("token", "old"));
  auto channels = HolderChannels::Make(api);
  ASSERT_TRUE(channels.ok()) << channels.status();
  const CapturedLog log;
  EXPECT_TRUE(absl::IsUnauthenticated(Fetch(**channels, address)));
  files.Write("token", "abc\n");
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(Fetch(**channels, address, "b")); }));
  files.Write("token", "two words\n");
  const std::string stay =
      absl::StrCat("connections to workers stay as they were: api.token: ", api.token(), " has");
  EXPECT_TRUE(Eventually([&] { return log.CountOf(stay) > 0; })) << log.Text();
  EXPECT_TRUE(absl::IsNotFound(Fetch(**channels, address, "b"))) << "the token stays as it was";
  files.Write("token", "test\n");
  EXPECT_TRUE(Eventually([&] { return absl::IsPermissionDenied(Fetch(**channels, address, "b")); }));
  channels->reset();
  EXPECT_THAT(log.Text(), HasSubstr("connections to workers take the new certificates and the new token"));
}

TEST(HolderService, ARenewedTokenCountsBesideTls) {
  const TestCertificates files;
  v1::Config config = WithCredentials(files);
  *config.mutable_api()->mutable_tls() = files.Tls("worker.pool");
  NoKv held;
  const auto service = HolderService::Start("127.0.0.1:0", config, held);
  ASSERT_TRUE(service.ok()) << service.status();
  v1::ApiSection api;
  *api.mutable_tls() = files.Tls("front-end.pool");
  api.mutable_tls()->set_server_name("worker.pool");
  api.set_token(files.Write("token", "old"));
  auto channels = HolderChannels::Make(api);
  ASSERT_TRUE(channels.ok()) << channels.status();
  const std::string& address = (*service)->address();
  EXPECT_TRUE(absl::IsUnauthenticated(Fetch(**channels, address)));
  files.Write("token", "abc\n");
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(Fetch(**channels, address, "b")); }));
}

// At every interface is nowhere that it could tell others.
TEST(HolderService, RefusesEveryInterface) {
  EndlessKv held;
  for (const char* listen : {"0.0.0.0:0", "[::]:0"}) {
    if (!ResolveFreeAddress(listen).ok()) continue;  // a machine without IPv6
    const auto service = HolderService::Start(listen, Defaults(), held);
    EXPECT_EQ(service.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(service.status().message()), testing::HasSubstr("is every interface"));
  }
}

// It may wait for another worker's part, and keeps its lease alive then.
TEST(HolderService, AReaderWhoStandsStillIsEndedOnceItsLeaseIs) {
  v1::Config config = Defaults();
  config.mutable_limits()->mutable_result_timeout()->set_seconds(0);
  config.mutable_limits()->mutable_result_timeout()->set_nanos(100'000'000);
  EndlessKv held;
  const auto service = HolderService::Start("127.0.0.1:0", config, held);
  ASSERT_TRUE(service.ok()) << service.status();
  const auto stub = v1::PrefillService::NewStub(
      grpc::CreateChannel((*service)->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = stub->FetchKv(&context, {});
  ASSERT_TRUE(Eventually([&] { return held.opened > 3; })) << "nobody looks whether its lease lives";
  held.lives = false;
  const int looks = held.opened;
  ASSERT_TRUE(Eventually([&] { return held.opened > looks; }));
  int parts = 0;
  for (v1::KvPart part; stream->Read(&part);) ++parts;  // what had come before
  EXPECT_LT(parts, 30);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// Where parts come from several places, what is gathered for a reader is more than its part.
TEST(HolderService, WhatReadersHoldBesideTheirPartsIsBoundedToo) {
  v1::Config config = Defaults();
  config.mutable_limits()->mutable_result_timeout()->set_seconds(0);
  config.mutable_limits()->mutable_result_timeout()->set_nanos(100'000'000);
  config.mutable_limits()->set_unread_bytes(100 << 20);
  EndlessKv held(/*held_bytes=*/60 << 20);
  const auto service = HolderService::Start("127.0.0.1:0", config, held);
  ASSERT_TRUE(service.ok()) << service.status();
  grpc::ChannelArguments own;
  own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // the window of a connection is shared
  const CapturedLog log;
  grpc::ClientContext contexts[2];
  std::vector<std::unique_ptr<grpc::ClientReader<v1::KvPart>>> readers;
  for (grpc::ClientContext& context : contexts) {
    const auto stub = v1::PrefillService::NewStub(
        grpc::CreateCustomChannel((*service)->address(), grpc::InsecureChannelCredentials(), own));
    readers.push_back(stub->FetchKv(&context, {}));
  }
  EXPECT_TRUE(Eventually([&] { return log.CountOf("its part has waited longest") == 1; })) << log.Text();
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (const auto& reader : readers) EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// As a front-end has them, but that a part may wait as long as one reader does.
TEST(HolderService, PartsThatNobodyReadsAreBounded) {
  v1::Config config = Defaults();
  config.mutable_limits()->set_unread_bytes(3 << 19);
  config.mutable_limits()->mutable_result_timeout()->set_seconds(0);
  config.mutable_limits()->mutable_result_timeout()->set_nanos(100'000'000);
  EndlessKv held;
  const CapturedLog log;
  const auto service = HolderService::Start("127.0.0.1:0", config, held);
  ASSERT_TRUE(service.ok()) << service.status();
  const auto stub = v1::PrefillService::NewStub(
      grpc::CreateChannel((*service)->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext first_context, second_context;
  const auto first = stub->FetchKv(&first_context, {});
  const auto second = stub->FetchKv(&second_context, {});
  EXPECT_TRUE(Eventually([&] { return log.CountOf("its part has waited longest for its reader") == 1; }))
      << log.Text();
  for (grpc::ClientContext* context : {&first_context, &second_context}) context->TryCancel();
  first->Finish();
  second->Finish();
}

TEST(HolderService, HealthFollowsTheMembership) {
  NoKv held;
  const auto service = HolderService::Start("127.0.0.1:0", Defaults(), held);
  ASSERT_TRUE(service.ok()) << service.status();
  EXPECT_EQ(Health((*service)->address(), ""), 1) << "the process lives";
  EXPECT_EQ(Health((*service)->address(), kWorkerHealthService), 2);
  for (const bool member : {true, false, true}) {
    (*service)->SetMember(member);
    EXPECT_EQ(Health((*service)->address(), kWorkerHealthService), member ? 1 : 2);
  }
  EXPECT_EQ(Health((*service)->address(), "meshfill.v1.Nothing"), -1);
}

}  // namespace
}  // namespace meshfill
