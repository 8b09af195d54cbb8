// Who may call what: every RPC with every kind of credential, and whose tenant a call is for.
#include "server/access/access.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/api/front_end.h"
#include "server/config/config.h"
#include "server/observe/metrics.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/captured_log.h"
#include "tests/server/eventually.h"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

using Metadata = std::vector<std::pair<std::string, std::string>>;

std::string Line(const std::string& name, const std::string& role, const std::string& tenant) {
  const std::string token = name + "-token";
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  return absl::StrCat(name, " ", role, " ", tenant,
                      " sha256:", absl::BytesToHexString({reinterpret_cast<const char*>(hash), sizeof(hash)}),
                      "\n");
}
Metadata Bearer(const std::string& name) { return {{"authorization", "Bearer " + name + "-token"}}; }
Metadata Of(Metadata credential, const std::string& tenant) {
  credential.emplace_back("meshfill-tenant", tenant);
  return credential;
}

class AccessTest : public testing::Test {
 protected:
  void Start(bool open, bool credentials = true) {
    v1::Config config =
        LoadConfig("", std::vector<std::string>{"listen=127.0.0.1:0", "pool.embedded.ranks=4"}).value();
    if (credentials) {
      config.mutable_api()->set_credentials(files_.Write(
          "credentials",
          absl::StrCat(Line("alice", "client", "a"), Line("bob", "client", "b"), Line("pool", "worker", "-"),
                       Line("ops", "admin", "-"), "carol client c certificate:carol.example\n")));
    }
    if (certificates_) {
      *config.mutable_api()->mutable_tls() = files_.Tls("server.example");
      config.mutable_api()->mutable_tls()->set_client_certificates(true);
    }
    auto front_end = FrontEnd::Start(config, metrics_);
    ASSERT_TRUE(front_end.ok()) << front_end.status();
    front_end_ = *std::move(front_end);
    if (!open) return;
    auto engine = std::make_unique<FakeEngine>();
    engine_ = engine.get();
    front_end_->Open(std::move(engine));
  }
  std::shared_ptr<grpc::Channel> Channel(const std::string& certificate = "") const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    if (certificate.empty()) {
      return grpc::CreateCustomChannel(front_end_->address(), grpc::InsecureChannelCredentials(), arguments);
    }
    arguments.SetSslTargetNameOverride("server.example");
    const v1::ApiSection::Tls tls = files_.Tls(certificate);
    return grpc::CreateCustomChannel(
        front_end_->address(),
        grpc::SslCredentials({TestCertificates::Read(tls.ca()), TestCertificates::Read(tls.key()),
                              TestCertificates::Read(tls.cert())}),
        arguments);
  }
  static void Prepare(grpc::ClientContext& context, const Metadata& metadata) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    for (const auto& [key, value] : metadata) context.AddMetadata(key, value);
  }
  // Any method, with one empty message, or with none and the upload left open.
  static grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                           const Metadata& metadata, bool with_message = true) {
    grpc::ClientContext context;
    Prepare(context, metadata);
    grpc::CompletionQueue queue;
    grpc::GenericStub stub(channel);
    const auto call = stub.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    if (with_message) {
      const grpc::Slice empty;
      call->WriteLast(grpc::ByteBuffer(&empty, 1), {}, nullptr);
      queue.Next(&tag, &ok);
    }
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    queue.Next(&tag, &ok);
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    return status;
  }
  // A prefill of one token, of this id.
  grpc::Status Prefill(const Metadata& metadata, const std::string& tenant, const std::string& id) const {
    const auto stub = v1::PrefillService::NewStub(Channel());
    grpc::ClientContext context;
    Prepare(context, metadata);
    const auto stream = stub->Prefill(&context);
    v1::PrefillRequest request;
    request.mutable_header()->set_token_count(1);
    request.mutable_header()->set_request_id(id);
    request.mutable_header()->set_tenant(tenant);
    stream->Write(request);
    request.mutable_tokens()->add_ids(7);
    stream->Write(request);
    stream->WritesDone();
    v1::PrefillEvent event;
    while (stream->Read(&event)) {
    }
    return stream->Finish();
  }
  grpc::Status Cancel(const Metadata& metadata, const std::string& id) const {
    grpc::ClientContext context;
    Prepare(context, metadata);
    v1::CancelRequest request;
    request.set_request_id(id);
    v1::CancelReply reply;
    return v1::PrefillService::NewStub(Channel())->Cancel(&context, request, &reply);
  }
  std::vector<std::string> RequestsThat(const Metadata& metadata) const {
    grpc::ClientContext context;
    Prepare(context, metadata);
    v1::PoolStatus pool;
    EXPECT_TRUE(v1::PrefillService::NewStub(Channel())->GetPool(&context, {}, &pool).ok());
    std::vector<std::string> ids;
    for (const auto& request : pool.requests()) ids.push_back(request.id());
    if (!pool.running_request_id().empty()) ids.push_back("running " + pool.running_request_id());
    return ids;
  }

  const TestCertificates files_;
  bool certificates_ = false;
  Metrics metrics_;
  std::unique_ptr<FrontEnd> front_end_;
  FakeEngine* engine_ = nullptr;
};

constexpr char kHealth[] = "/grpc.health.v1.Health/Check";

// The roles that may call each RPC. A new one has no row, and fails here until it has.
const std::map<std::string, std::set<std::string>>& Rows() {
  static const auto& rows = *new std::map<std::string, std::set<std::string>>{
      {"Prefill", {"client", "admin"}}, {"FetchKv", {"client", "worker", "admin"}},
      {"RenewKv", {"client", "admin"}}, {"ReleaseKv", {"client", "admin"}},
      {"Cancel", {"client", "admin"}},  {"Plan", {"client", "admin"}},
      {"GetPool", {"client", "admin"}},
  };
  return rows;
}

TEST_F(AccessTest, EveryRpcAsksForItsRoles) {
  const auto* const service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
      v1::PrefillService::service_full_name());
  ASSERT_NE(service, nullptr);
  const std::vector<std::pair<std::string, Metadata>> callers = {
      {"client", Bearer("alice")}, {"worker", Bearer("pool")}, {"admin", Bearer("ops")}};
  const std::vector<std::pair<std::string, Metadata>> nobodies = {
      {"none", {}},
      {"a wrong token", Bearer("mallory")},
      {"no token", {{"authorization", "Bearer "}}},
      {"the hash",
       {{"authorization", "Bearer 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}}},
      {"another scheme", {{"authorization", "Basic alice-token"}}},
      {"no scheme", {{"authorization", "alice-token"}}},
      {"another header", {{"x-authorization", "Bearer alice-token"}}},
      {"two tokens", {Bearer("alice")[0], Bearer("ops")[0]}},
      {"two spaces", {{"authorization", "Bearer  alice-token"}}}};
  for (const bool open : {false, true}) {
    Start(open);
    const auto channel = Channel();
    for (int i = 0; i < service->method_count(); ++i) {
      const std::string name = service->method(i)->name();
      const std::string method = absl::StrCat("/", service->full_name(), "/", name);
      ASSERT_TRUE(Rows().contains(name)) << name << " has no row: say which roles may call it";
      for (const auto& [role, metadata] : callers) {
        const grpc::Status status = Call(channel, method, metadata);
        EXPECT_NE(status.error_code(), StatusCode::UNAUTHENTICATED) << name << " by " << role;
        EXPECT_EQ(status.error_code() == StatusCode::PERMISSION_DENIED, !Rows().at(name).contains(role))
            << name << " by " << role << ": " << status.error_message();
      }
      for (const auto& [what, metadata] : nobodies) {
        const grpc::Status status = Call(channel, method, metadata);
        EXPECT_EQ(status.error_code(), StatusCode::UNAUTHENTICATED) << name << " with " << what;
        EXPECT_THAT(status.error_message(), Not(HasSubstr("-token")));
      }
    }
    EXPECT_EQ(Call(channel, kHealth, {}).error_code(), StatusCode::OK) << "probes have no credential";
    front_end_.reset();
  }
  for (const auto& [name, roles] : Rows()) {
    if (name == "Prefill") continue;  // its refusals are counted by reason
    EXPECT_THAT(metrics_.Text(),
                HasSubstr(absl::StrCat("meshfill_calls_refused_total{call=\"", name,
                                       "\",code=\"UNAUTHENTICATED\"} ", 2 * nobodies.size(), "\n")));
  }
}

TEST_F(AccessTest, ARefusalNamesTheCallerAndItsRole) {
  Start(true);
  EXPECT_THAT(Cancel(Bearer("pool"), "1").error_message(),
              HasSubstr("\"pool\" has the role worker, which may not call this"));
  const std::string named(1000, 'x');
  const absl::Status other =
      TenantFor({.name = "alice", .role = Role::kClient, .tenant = "a"}, named).status();
  EXPECT_THAT(std::string(other.message()), HasSubstr(named.substr(0, 128) + "\";")) << "cut";
}

TEST_F(AccessTest, AStreamIsRefusedBeforeItsUploadIsRead) {
  Start(true);
  const auto channel = Channel();
  for (const auto& [metadata, code] : {std::pair(Metadata(), StatusCode::UNAUTHENTICATED),
                                       std::pair(Bearer("pool"), StatusCode::PERMISSION_DENIED)}) {
    EXPECT_EQ(
        Call(channel, "/meshfill.v1.PrefillService/Prefill", metadata, /*with_message=*/false).error_code(),
        code);
  }
  EXPECT_TRUE(absl::StrContains(metrics_.Text(), "code=\"UNAUTHENTICATED\""));
}

TEST_F(AccessTest, WithoutAFileEverybodyMayDoAll) {
  Start(true, /*credentials=*/false);
  EXPECT_TRUE(Prefill({}, "any", "1").ok());
  EXPECT_TRUE(Prefill(Bearer("mallory"), "any", "2").ok()) << "a token that nobody asks for";
}

TEST_F(AccessTest, ATenantIsItsCredentials) {
  Start(true);
  EXPECT_TRUE(Prefill({{"authorization", "bearer alice-token"}}, "", "1").ok()) << "RFC 9110 §11.1";
  EXPECT_TRUE(Prefill(Bearer("alice"), "a", "2").ok());
  const grpc::Status denied = Prefill(Bearer("alice"), "b", "3");
  EXPECT_EQ(denied.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(denied.error_message(),
            "\"alice\" calls for the tenant \"a\" alone, not for \"b\"; leave the tenant out");
  const std::string longest(128, 'x');
  EXPECT_EQ(Prefill(Bearer("alice"), longest + longest, "3").error_message(),
            absl::StrCat("\"alice\" calls for the tenant \"a\" alone, not for \"", longest,
                         "\"; leave the tenant out"));
  EXPECT_TRUE(Prefill(Bearer("ops"), "b", "4").ok());
  EXPECT_TRUE(Prefill(Bearer("ops"), "", "5").ok());
  const auto channel = Channel();
  for (const char* method : {"FetchKv", "RenewKv", "ReleaseKv", "Cancel"}) {
    const std::string path = absl::StrCat("/meshfill.v1.PrefillService/", method);
    EXPECT_EQ(Call(channel, path, Of(Bearer("alice"), "b")).error_code(), StatusCode::PERMISSION_DENIED)
        << method;
    for (const Metadata& good : {Of(Bearer("alice"), "a"), Bearer("alice"), Of(Bearer("ops"), "b")}) {
      EXPECT_NE(Call(channel, path, good).error_code(), StatusCode::PERMISSION_DENIED) << method;
    }
  }
}

TEST_F(AccessTest, ClientsSeeAndCancelWhatIsTheirs) {
  Start(true);
  engine_->Hold();
  std::vector<std::thread> threads;
  std::map<std::string, grpc::Status> statuses{{"1", {}}, {"2", {}}};
  threads.emplace_back([&] { statuses.at("1") = Prefill(Bearer("alice"), "", "1"); });
  ASSERT_TRUE(engine_->WaitForBegun(1));
  threads.emplace_back([&] { statuses.at("2") = Prefill(Bearer("bob"), "", "2"); });
  const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
  while (RequestsThat(Bearer("ops")).size() < 3 && MonotonicNow() < deadline)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_THAT(RequestsThat(Bearer("ops")), ElementsAre("1", "2", "running 1"));
  EXPECT_THAT(RequestsThat(Bearer("alice")), ElementsAre("1", "running 1"));
  EXPECT_THAT(RequestsThat(Bearer("bob")), ElementsAre("2"));
  EXPECT_EQ(Cancel(Bearer("bob"), "1").error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Cancel(Of(Bearer("bob"), "a"), "1").error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Cancel(Bearer("pool"), "1").error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Cancel(Of(Bearer("ops"), "b"), "1").error_code(), StatusCode::NOT_FOUND) << "it is of a";
  EXPECT_EQ(Cancel(Bearer("ops"), "3").error_code(), StatusCode::NOT_FOUND);
  EXPECT_TRUE(Cancel(Bearer("ops"), "1").ok()) << "an admin need not name whose it is";
  EXPECT_TRUE(Cancel(Bearer("bob"), "2").ok());
  engine_->Release();
  for (std::thread& each : threads) each.join();
  for (const auto& [id, status] : statuses) EXPECT_EQ(status.error_code(), StatusCode::CANCELLED) << id;
}

TEST_F(AccessTest, ACertificateIsACredential) {
  certificates_ = true;
  Start(true);
  const std::string plan = "/meshfill.v1.PrefillService/GetPool";
  EXPECT_EQ(Call(Channel("carol.example"), plan, {}).error_code(), StatusCode::OK);
  const grpc::Status unknown = Call(Channel("dave.example"), plan, {});
  EXPECT_EQ(unknown.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(unknown.error_message(), HasSubstr("nobody of this certificate's name is known here"));
  EXPECT_EQ(Call(Channel("dave.example"), plan, Bearer("ops")).error_code(), StatusCode::OK)
      << "by its token";
  EXPECT_EQ(Call(Channel("carol.example"), plan, Bearer("mallory")).error_code(),
            StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Call(Channel("carol.example"), "/meshfill.v1.PrefillService/Cancel", {{"meshfill-tenant", "a"}})
                .error_code(),
            StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Call(Channel(), kHealth, {}).error_code(), StatusCode::UNAVAILABLE) << "plain text";
}

TEST_F(AccessTest, AChangedFileCountsAndABadOneDoesNot) {
  Start(true);
  const auto channel = Channel();
  const auto status_of = [&](const std::string& name) {
    return Call(channel, "/meshfill.v1.PrefillService/GetPool", Bearer(name)).error_code();
  };
  const auto eventually = [&](const std::string& name, StatusCode code) {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
    while (status_of(name) != code && MonotonicNow() < deadline) absl::SleepFor(absl::Milliseconds(10));
    return status_of(name) == code;
  };
  const CapturedLog log;
  EXPECT_EQ(status_of("alice"), StatusCode::OK);
  files_.Write("credentials", Line("dora", "client", "d"));
  EXPECT_TRUE(eventually("dora", StatusCode::OK));
  EXPECT_EQ(status_of("alice"), StatusCode::UNAUTHENTICATED) << "taken out";
  files_.Write("credentials", Line("alice", "client", "a") + "nonsense\n");
  const std::string stay =
      absl::StrCat("callers stay as they were: ", files_.Path("credentials"), ":2: 1 words");
  EXPECT_TRUE(Eventually([&] { return log.CountOf(stay) > 0; })) << log.Text();
  EXPECT_EQ(status_of("dora"), StatusCode::OK);
  EXPECT_EQ(status_of("alice"), StatusCode::UNAUTHENTICATED);
  files_.Write("credentials", Line("alice", "client", "a"));
  EXPECT_TRUE(eventually("alice", StatusCode::OK));
  front_end_.reset();
  EXPECT_THAT(log.Text(), HasSubstr("callers are now those in "));
}

TEST_F(AccessTest, MistakesAreToldAtStart) {
  v1::Config config = LoadConfig("", std::vector<std::string>{"listen=127.0.0.1:0"}).value();
  config.mutable_api()->set_credentials("/nowhere");
  EXPECT_THAT(std::string(FrontEnd::Start(config, metrics_).status().message()),
              HasSubstr("api.credentials: /nowhere cannot be read: No such file or directory"));
  config.mutable_api()->set_credentials(files_.Write("bad", "alice client a alice-token\n"));
  const absl::Status bad = FrontEnd::Start(config, metrics_).status();
  EXPECT_EQ(bad.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.message()), HasSubstr("bad:1: the credential"));
  EXPECT_THAT(std::string(bad.message()), Not(HasSubstr("alice-token")));
}

}  // namespace
}  // namespace meshfill
