// The two ends of the control stream against each other, in plain text and in TLS.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/pool/control_service.h"
#include "server/pool/worker/control_client.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

// Writes down what it hears, in order.
class Recorder {
 public:
  void Add(std::string line) {
    const std::lock_guard<std::mutex> lock(mu_);
    lines_.push_back(std::move(line));
    changed_.notify_all();
  }
  // Empty after 10 s.
  std::string Next() {
    std::unique_lock<std::mutex> lock(mu_);
    if (!changed_.wait_for(lock, std::chrono::seconds(10), [this] { return read_ < lines_.size(); }))
      return "";
    return lines_[read_++];
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<std::string> lines_;
  size_t read_ = 0;
};

class LeaderEnd final : public ControlService::Listener, public Recorder {
 public:
  void OnConnected(ControlService::Connection connection) override {
    Add(absl::StrCat("connected ", connection));
  }
  void OnMessage(ControlService::Connection connection, const v1::WorkerMessage& message) override {
    Add(absl::StrCat(connection, " says ", message.join().name()));
  }
  void OnDisconnected(ControlService::Connection connection) override {
    Add(absl::StrCat("lost ", connection));
  }
};

class WorkerEnd final : public ControlClient::Listener, public Recorder {
 public:
  void OnMessage(ControlClient::Connection connection, const v1::LeaderMessage& message) override {
    Add(absl::StrCat(connection, " hears ", message.refused().reason()));
  }
  void OnDisconnected(ControlClient::Connection connection, const absl::Status& why) override {
    {
      const std::lock_guard<std::mutex> lock(why_mu_);
      why_ = why;
    }
    Add(absl::StrCat("lost ", connection));
  }
  absl::Status why() {  // of the newest loss
    const std::lock_guard<std::mutex> lock(why_mu_);
    return why_;
  }

 private:
  std::mutex why_mu_;
  absl::Status why_;
};

v1::WorkerMessage Hello(const std::string& name) {
  v1::WorkerMessage message;
  message.mutable_join()->set_name(name);
  return message;
}

v1::LeaderMessage Reason(const std::string& reason) {
  v1::LeaderMessage message;
  message.mutable_refused()->set_reason(reason);
  return message;
}

v1::PoolSection::Tls Certificates(const std::string& name, const std::string& authority = "authority") {
  v1::PoolSection::Tls tls;
  tls.set_cert(absl::StrCat(MESHFILL_CERTIFICATES, "/", name, ".pem"));
  tls.set_key(absl::StrCat(MESHFILL_CERTIFICATES, "/", name, ".key"));
  tls.set_ca(absl::StrCat(MESHFILL_CERTIFICATES, "/", authority, ".pem"));
  return tls;
}

class ControlStreamTest : public testing::Test {
 protected:
  void Start(const v1::PoolSection::Tls& tls = {}) {
    v1::PoolSection pool;
    pool.set_control_listen("127.0.0.1:0");
    *pool.mutable_tls() = tls;
    auto service = ControlService::Start(pool, leader_);
    ASSERT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
  }
  std::unique_ptr<ControlClient> Client(const v1::PoolSection::Tls& tls = {}) {
    auto client = ControlClient::Make(service_->address(), tls, worker_);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  LeaderEnd leader_;
  WorkerEnd worker_;
  std::unique_ptr<ControlService> service_;
};

TEST_F(ControlStreamTest, CarriesMessagesInOrderAndClosesAfterThem) {
  Start();
  const auto client = Client();
  client->Connect(1);
  for (int i = 0; i < 100; ++i) client->Send(Hello(absl::StrCat(i)));
  EXPECT_EQ(leader_.Next(), "connected 1");
  for (int i = 0; i < 100; ++i) EXPECT_EQ(leader_.Next(), absl::StrCat("1 says ", i));
  for (int i = 0; i < 100; ++i) service_->Send(1, Reason(absl::StrCat(i)));
  service_->Close(1);
  service_->Send(1, Reason("too late"));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(worker_.Next(), absl::StrCat("1 hears ", i));
  EXPECT_EQ(worker_.Next(), "lost 1");
}

// A worker's tokens of a long prompt come in one message.
TEST_F(ControlStreamTest, TheLeadersMessagesHaveNoBound) {
  Start();
  const auto client = Client();
  client->Connect(1);
  EXPECT_EQ(leader_.Next(), "connected 1");
  const std::string reason(size_t{20} << 20, 'x');
  service_->Send(1, Reason(reason));
  EXPECT_EQ(worker_.Next(), absl::StrCat("1 hears ", reason));
}

TEST_F(ControlStreamTest, EachSideHearsOfTheOthersEnd) {
  Start();
  auto client = Client();
  client->Connect(1);
  EXPECT_EQ(leader_.Next(), "connected 1");
  client->Disconnect(1);
  EXPECT_EQ(leader_.Next(), "lost 1");
  EXPECT_EQ(worker_.Next(), "lost 1");
  client->Connect(2);
  client->Send(Hello("again"));
  EXPECT_EQ(leader_.Next(), "connected 2");
  EXPECT_EQ(leader_.Next(), "2 says again");
  service_.reset();
  EXPECT_EQ(worker_.Next(), "lost 2");
  client->Connect(3);  // nobody listens
  EXPECT_EQ(worker_.Next(), "lost 3");
  client.reset();
}

// A worker that is about to join again talks to the new stream, whatever becomes of the old one.
TEST_F(ControlStreamTest, TheNewestConnectionIsTheOneThatIsTalkedTo) {
  Start();
  const auto client = Client();
  client->Connect(1);
  EXPECT_EQ(leader_.Next(), "connected 1");
  client->Connect(2);
  client->Send(Hello("x"));
  EXPECT_EQ(leader_.Next(), "connected 2");
  EXPECT_EQ(leader_.Next(), "2 says x");
  service_->Send(1, Reason("to the old one"));
  EXPECT_EQ(worker_.Next(), "1 hears to the old one");
  client->Disconnect(2);
  EXPECT_EQ(leader_.Next(), "lost 2");
  EXPECT_EQ(worker_.Next(), "lost 2");
  client->Send(Hello("to nobody"));
  client->Disconnect(1);
  EXPECT_EQ(leader_.Next(), "lost 1") << "nothing was said meanwhile";
}

TEST_F(ControlStreamTest, TheEndOfTheOldStreamLeavesTheNewOne) {
  Start();
  const auto client = Client();
  client->Connect(1);
  EXPECT_EQ(leader_.Next(), "connected 1");
  client->Connect(2);
  EXPECT_EQ(leader_.Next(), "connected 2");
  client->Disconnect(1);
  EXPECT_EQ(leader_.Next(), "lost 1");
  EXPECT_EQ(worker_.Next(), "lost 1");
  for (int i = 0; i < 20; ++i) {  // the client forgets it some time after it has told of its end
    client->Send(Hello(absl::StrCat(i)));
    ASSERT_EQ(leader_.Next(), absl::StrCat("2 says ", i));
  }
}

TEST_F(ControlStreamTest, AnEndSaysWhy) {
  Start(Certificates("leader"));
  const auto good = Client(Certificates("worker"));
  good->Connect(1);
  EXPECT_EQ(leader_.Next(), "connected 1");
  service_->Send(1, Reason("you are not wanted"));
  service_->Close(1);
  EXPECT_EQ(worker_.Next(), "1 hears you are not wanted");
  EXPECT_EQ(worker_.Next(), "lost 1");
  EXPECT_EQ(worker_.why(), absl::UnavailableError("the leader closed it"));
  const auto stranger = Client(Certificates("stranger"));
  stranger->Connect(2);
  EXPECT_EQ(worker_.Next(), "lost 2");
  EXPECT_TRUE(absl::IsUnavailable(worker_.why())) << worker_.why();
  EXPECT_NE(worker_.why().message().find("without a certificate that its pool.tls.ca has signed"),
            absl::string_view::npos)
      << worker_.why();
  good->Connect(3);
  EXPECT_EQ(leader_.Next(), "lost 1");
  EXPECT_EQ(leader_.Next(), "connected 2") << "the stranger never came through";
  service_->Send(2, Reason("welcome"));
  EXPECT_EQ(worker_.Next(), "3 hears welcome");
  service_.reset();
  EXPECT_EQ(worker_.Next(), "lost 3");
  EXPECT_EQ(worker_.why().message().find("certificate"), absl::string_view::npos) << worker_.why();
}

// Workers find their leader without the proxy that a cluster has for what is outside.
TEST_F(ControlStreamTest, GoesThroughNoProxy) {
  setenv("grpc_proxy", "http://127.0.0.1:9", /*overwrite=*/1);
  Start();
  const auto client = Client();
  client->Connect(1);
  client->Send(Hello("x"));
  EXPECT_EQ(leader_.Next(), "connected 1");
  EXPECT_EQ(leader_.Next(), "1 says x");
  unsetenv("grpc_proxy");
}

// A leader that takes a call and says nothing does not hold up the next attempt.
TEST_F(ControlStreamTest, EachAttemptCallsTheLeaderAnew) {
  const int leader = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in here = {};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(here);
  ASSERT_EQ(bind(leader, reinterpret_cast<sockaddr*>(&here), length), 0);
  ASSERT_EQ(getsockname(leader, reinterpret_cast<sockaddr*>(&here), &length), 0);
  ASSERT_EQ(listen(leader, 2), 0);
  auto client = ControlClient::Make(absl::StrCat("127.0.0.1:", ntohs(here.sin_port)), {}, worker_);
  ASSERT_TRUE(client.ok()) << client.status();
  std::vector<int> calls;
  for (const ControlClient::Connection attempt : {1, 2}) {
    (*client)->Connect(attempt);
    pollfd called = {.fd = leader, .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&called, 1, /*timeout=*/10'000), 1) << "attempt " << attempt;
    if (called.revents != 0) calls.push_back(accept(leader, nullptr, nullptr));
  }
  client->reset();
  for (const int call : calls) close(call);
  close(leader);
}

// Somebody else's server, which answers in its own way, is not said to be away.
TEST_F(ControlStreamTest, WhatAnotherServerSaysIsToldAsItIs) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  grpc::CallbackGenericService unknown;
  builder.RegisterCallbackGenericService(&unknown);
  const auto server = builder.BuildAndStart();
  const auto client = ControlClient::Make(absl::StrCat("127.0.0.1:", port), {}, worker_);
  ASSERT_TRUE(client.ok()) << client.status();
  (*client)->Connect(1);
  EXPECT_EQ(worker_.Next(), "lost 1");
  EXPECT_TRUE(absl::IsUnimplemented(worker_.why())) << worker_.why();
}

TEST_F(ControlStreamTest, ManyConnectionsComeAndGo) {
  Start();
  for (int round = 0; round < 30; ++round) {
    const auto client = Client();
    client->Connect(1);
    client->Send(Hello("x"));
    if (round % 3 != 0) leader_.Next();
    if (round % 3 == 2) client->Disconnect(1);
  }
}

// A stream that has ended keeps no connection.
TEST_F(ControlStreamTest, EndedStreamsHoldNothing) {
  Start();
  const auto client = Client();
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  std::ptrdiff_t after_few = 0;
  constexpr ControlClient::Connection kFew = 10, kMany = 60;
  for (ControlClient::Connection i = 1; i <= kMany; ++i) {
    client->Connect(i);
    ASSERT_EQ(leader_.Next(), absl::StrCat("connected ", i));
    client->Disconnect(i);
    ASSERT_EQ(leader_.Next(), absl::StrCat("lost ", i));
    ASSERT_EQ(worker_.Next(), absl::StrCat("lost ", i));
    if (i == kFew) after_few = descriptors();
  }
  EXPECT_LT(descriptors(), after_few + static_cast<std::ptrdiff_t>(kMany - kFew) / 2);
}

TEST_F(ControlStreamTest, TlsWantsACertificateOfItsAuthority) {
  Start(Certificates("leader"));
  const auto good = Client(Certificates("worker"));
  good->Connect(1);
  good->Send(Hello("worker"));
  EXPECT_EQ(leader_.Next(), "connected 1");
  EXPECT_EQ(leader_.Next(), "1 says worker");

  const auto plain = Client();
  plain->Connect(2);
  EXPECT_EQ(worker_.Next(), "lost 2");
  const auto stranger = Client(Certificates("stranger"));
  stranger->Connect(3);
  EXPECT_EQ(worker_.Next(), "lost 3");
  const auto deceived = Client(Certificates("worker", "other_authority"));
  deceived->Connect(4);
  EXPECT_EQ(worker_.Next(), "lost 4");
  good->Send(Hello("still there"));
  EXPECT_EQ(leader_.Next(), "1 says still there") << "the others never came through";
}

// Each connection takes the files as they are; where they are bad, as they were at the start.
TEST_F(ControlStreamTest, RenewedCertificatesCountAndBadOnesDoNot) {
  Start(Certificates("leader"));
  const TempFolder folder;
  v1::PoolSection::Tls files;
  files.set_cert(folder / "own.pem");
  files.set_key(folder / "own.key");
  files.set_ca(Certificates("worker").ca());
  const auto renew = [&](const std::string& name) {
    const v1::PoolSection::Tls tls = Certificates(name);
    constexpr auto kOver = std::filesystem::copy_options::overwrite_existing;
    std::filesystem::copy_file(tls.cert(), files.cert(), kOver);
    std::filesystem::copy_file(tls.key(), files.key(), kOver);
  };
  renew("worker");
  const auto client = Client(files);
  folder.Write("own.pem", "no certificate");
  client->Connect(1);
  EXPECT_EQ(leader_.Next(), "connected 1") << "with the certificate as it was";
  renew("stranger");
  client->Connect(2);
  EXPECT_EQ(worker_.Next(), "lost 2") << "with the stranger's, which the leader's authority has not signed";
  renew("worker");
  client->Connect(3);
  EXPECT_EQ(leader_.Next(), "connected 2") << "the stranger never came through";
}

TEST_F(ControlStreamTest, PlainTextStaysOnThisMachine) {
  v1::PoolSection pool;
  pool.set_control_listen("0.0.0.0:0");
  EXPECT_EQ(ControlService::Start(pool, leader_).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ControlClient::Make("192.0.2.1:1", {}, worker_).status().code(),
            absl::StatusCode::kInvalidArgument);
  pool.mutable_tls()->set_insecure(true);
  EXPECT_TRUE(ControlService::Start(pool, leader_).ok());
  EXPECT_TRUE(ControlClient::Make("192.0.2.1:1", pool.tls(), worker_).ok());
}

TEST_F(ControlStreamTest, MissingCertificatesAndBusyPortsAreNamed) {
  v1::PoolSection pool;
  pool.set_control_listen("127.0.0.1:0");
  *pool.mutable_tls() = Certificates("leader");
  pool.mutable_tls()->set_key("/nowhere.key");
  const absl::Status no_key = ControlService::Start(pool, leader_).status();
  EXPECT_EQ(no_key.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(no_key.message().find("/nowhere.key"), std::string::npos) << no_key;
  Start();
  pool.clear_tls();
  pool.set_control_listen(service_->address());
  EXPECT_EQ(ControlService::Start(pool, leader_).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace meshfill
