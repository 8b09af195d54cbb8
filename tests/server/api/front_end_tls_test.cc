// The API's port in TLS: who gets in, and which addresses may do without.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "server/access/file_watch.h"
#include "server/api/front_end.h"
#include "server/config/config.h"
#include "server/observe/metrics.h"
#include "tests/server/access/test_certificates.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

constexpr char kName[] = "api.example";

class FrontEndTlsTest : public testing::Test {
 protected:
  FrontEndTlsTest() : config_(LoadConfig("").value()) {
    config_.set_listen("127.0.0.1:0");
    *config_.mutable_api()->mutable_tls() = made_.Tls(kName);
  }
  absl::Status Start() {
    auto front_end = FrontEnd::Start(config_, metrics_);
    if (front_end.ok()) front_end_ = *std::move(front_end);
    return front_end.status();
  }
  grpc::StatusCode Call(const std::shared_ptr<grpc::ChannelCredentials>& credentials) const {
    grpc::ChannelArguments arguments;
    arguments.SetSslTargetNameOverride(kName);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub =
        v1::PrefillService::NewStub(grpc::CreateCustomChannel(front_end_->address(), credentials, arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::PoolStatus status;
    return stub->GetPool(&context, {}, &status).error_code();
  }
  static std::shared_ptr<grpc::ChannelCredentials> Tls(const TestCertificates& trusted,
                                                       const TestCertificates* own = nullptr) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = TestCertificates::Read(trusted.Path("ca.pem"));
    if (own != nullptr) {
      const v1::ApiSection::Tls tls = own->Tls("client");
      options.pem_cert_chain = TestCertificates::Read(tls.cert());
      options.pem_private_key = TestCertificates::Read(tls.key());
    }
    return grpc::SslCredentials(options);
  }

  const TestCertificates made_, others_;
  v1::Config config_;
  Metrics metrics_;
  std::unique_ptr<FrontEnd> front_end_;
};

TEST_F(FrontEndTlsTest, ClientsTrustTheServersAuthority) {
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Call(Tls(made_)), grpc::StatusCode::OK);
  EXPECT_EQ(Call(Tls(made_, &others_)), grpc::StatusCode::OK) << "no certificate is asked for";
  EXPECT_EQ(Call(Tls(others_)), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(grpc::InsecureChannelCredentials()), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(Tls(made_)), grpc::StatusCode::OK);
}

TEST_F(FrontEndTlsTest, ClientsShowACertificateWhereTheyMust) {
  config_.mutable_api()->mutable_tls()->set_client_certificates(true);
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Call(Tls(made_, &made_)), grpc::StatusCode::OK);
  EXPECT_EQ(Call(Tls(made_)), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(Tls(made_, &others_)), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(grpc::InsecureChannelCredentials()), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(Tls(made_, &made_)), grpc::StatusCode::OK);
}

TEST_F(FrontEndTlsTest, PlainTextStaysOnThisMachineUnlessItIsAllowed) {
  config_.set_listen("0.0.0.0:0");
  EXPECT_TRUE(Start().ok());
  front_end_.reset();
  config_.clear_api();
  for (const char* beyond : {"0.0.0.0:0", "[::]:0"}) {
    config_.set_listen(beyond);
    const absl::Status status = Start();
    if (absl::IsUnavailable(status)) continue;  // a machine without IPv6
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << beyond;
    EXPECT_THAT(std::string(status.message()), HasSubstr("api.tls.insecure=true"));
  }
  config_.set_listen("0.0.0.0:0");
  config_.mutable_api()->mutable_tls()->set_insecure(true);
  EXPECT_TRUE(Start().ok());
  EXPECT_EQ(Call(grpc::InsecureChannelCredentials()), grpc::StatusCode::OK);
  config_.clear_api();
  for (const char* here : {"127.0.0.1:0", "localhost:0", "127.1.2.3:0"}) {
    config_.set_listen(here);
    EXPECT_TRUE(Start().ok()) << here;
  }
}

// Connections begin all the time while certificate, key and authority change: none fails that trusts both.
TEST_F(FrontEndTlsTest, ChangedFilesAreTakenOverUnderLoad) {
  const v1::ApiSection::Tls old = made_.Tls(kName), next = others_.Tls(kName);
  config_.mutable_api()->mutable_tls()->set_client_certificates(true);
  ASSERT_TRUE(Start().ok());
  const std::string both = TestCertificates::Read(old.ca()) + TestCertificates::Read(next.ca());
  made_.Write("ca.pem", both);
  const v1::ApiSection::Tls own = made_.Tls("client");
  const std::string key = TestCertificates::Read(own.key()), certificate = TestCertificates::Read(own.cert());
  const auto trusts = [&](const std::string& authorities) {
    return grpc::SslCredentials({authorities, key, certificate});
  };
  std::atomic<bool> stop = false;
  std::atomic<int> calls = 0, failed = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back([&] {
      while (!stop) {
        failed += Call(trusts(both)) == grpc::StatusCode::OK ? 0 : 1;
        ++calls;
      }
    });
  }
  const auto eventually = [&](const std::string& authorities, grpc::StatusCode code) {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
    while (Call(trusts(authorities)) != code) {
      if (MonotonicNow() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return true;
  };
  const std::string next_authority = TestCertificates::Read(next.ca());
  EXPECT_NE(Call(trusts(next_authority)), grpc::StatusCode::OK);
  made_.Write(std::string(kName) + ".pem", "no certificate");  // changes nothing
  absl::SleepFor(3 * FileWatch::kPeriod);
  EXPECT_EQ(Call(trusts(both)), grpc::StatusCode::OK);
  made_.Write(std::string(kName) + ".key", TestCertificates::Read(next.key()));
  made_.Write(std::string(kName) + ".pem", TestCertificates::Read(next.cert()));
  EXPECT_TRUE(eventually(next_authority, grpc::StatusCode::OK)) << "the new certificate";
  stop = true;
  for (std::thread& each : clients) each.join();
  EXPECT_EQ(failed, 0) << "of " << calls;
  EXPECT_GT(calls, 0);
}

// A client need not know who stands between the authority that it trusts and the server.
TEST_F(FrontEndTlsTest, TheChainIsSentAlong) {
  const auto between_key = TestCertificates::MakeKey(0), own_key = TestCertificates::MakeKey(0);
  const auto between = made_.Sign("between", between_key, {.usage = "", .authority = true});
  const auto own = TestCertificates::Sign(kName, own_key, {}, between, between_key);
  made_.Write(std::string(kName) + ".key", TestCertificates::Pem(own_key));
  made_.Write(std::string(kName) + ".pem", TestCertificates::Pem(own) + TestCertificates::Pem(between));
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(Call(Tls(made_)), grpc::StatusCode::OK);
  EXPECT_EQ(Call(Tls(others_)), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(FrontEndTlsTest, MistakesAreToldAtStart) {
  config_.mutable_api()->mutable_tls()->set_key("/nowhere.key");
  const absl::Status status = Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("api.tls.key: /nowhere.key cannot be read"));
}

}  // namespace
}  // namespace meshfill
