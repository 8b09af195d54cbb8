#include "server/listener/connection_acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "tests/engine/few_descriptors.h"

namespace meshfill {
namespace {

constexpr int kWaitMilliseconds = 10'000;

int Connect(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(port);
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  return fd;
}

// Whether the server greets a connection ("+"), or closes it.
bool IsGreeted(int fd) {
  pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&ready, 1, kWaitMilliseconds), 1) << "neither greeted nor closed";
  char byte = 0;
  return read(fd, &byte, 1) == 1 && byte == '+';
}

class ConnectionAcceptorTest : public testing::Test {
 protected:
  void Listen(int max_connections, const std::string& host = "127.0.0.1") {
    auto acceptor = ConnectionAcceptor::Bind({host, 0}, max_connections);
    ASSERT_TRUE(acceptor.ok()) << acceptor.status();
    acceptor_ = *std::move(acceptor);
    acceptor_->Start([this](int fd) {
      const MutexLock lock(mu_);
      taken_.insert(fd);
      EXPECT_EQ(write(fd, "+", 1), 1);
    });
  }
  void TearDown() override {
    acceptor_.reset();
    CloseTaken();
    for (const int fd : clients_) close(fd);
  }
  bool ConnectIsGreeted() {
    clients_.push_back(Connect(acceptor_->address().port));
    return IsGreeted(clients_.back());
  }
  void CloseTaken() {
    const MutexLock lock(mu_);
    for (const int fd : taken_) close(fd);
    taken_.clear();
  }

  std::unique_ptr<ConnectionAcceptor> acceptor_;
  std::vector<int> clients_;
  Mutex mu_;
  std::set<int> taken_ ABSL_GUARDED_BY(mu_);
};

TEST_F(ConnectionAcceptorTest, BoundsTheConnectionsAndTakesNewOnesWhenOldOnesEnd) {
  Listen(3);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(ConnectIsGreeted()) << i;
    for (int i = 0; i < 5; ++i) EXPECT_FALSE(ConnectIsGreeted()) << i;
    CloseTaken();
    const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
    while (!ConnectIsGreeted()) ASSERT_LT(MonotonicNow(), deadline);
    CloseTaken();
    usleep(150'000);  // longer than the acceptor's look at what has ended is apart
  }
}

TEST_F(ConnectionAcceptorTest, GoesOnWhenDescriptorsAreFreeAgain) {
  Listen(10'000);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(ConnectIsGreeted());
  // No descriptor is free for a connection; the test's own end of one takes what is left.
  std::vector<int> sockets;
  for (int i = 0; i < 3; ++i) sockets.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(sockets.back()) + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  for (const int fd : sockets) {
    sockaddr_in peer{};
    peer.sin_family = AF_INET;
    peer.sin_port = htons(acceptor_->address().port);
    peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
    EXPECT_FALSE(IsGreeted(fd));
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  for (const int fd : sockets) close(fd);
  EXPECT_TRUE(ConnectIsGreeted());
}

// A process that has hardly any descriptor left keeps the rest for its files.
TEST_F(ConnectionAcceptorTest, TheLastDescriptorsAreForOthers) {
  Listen(10'000);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  clients_.push_back(client);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(client) + 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_FALSE(ConnectIsGreeted());
  low.rlim_cur = static_cast<rlim_t>(client) + 200;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_TRUE(ConnectIsGreeted());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// What is written goes at once; a peer that is gone without a word is found out.
TEST_F(ConnectionAcceptorTest, ConnectionsAreSetUpForStreams) {
  Listen(1);
  ASSERT_TRUE(ConnectIsGreeted());
  const MutexLock lock(mu_);
  const int fd = *taken_.begin();
  const auto option = [fd](int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    EXPECT_EQ(getsockopt(fd, level, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(IPPROTO_TCP, TCP_NODELAY), 1);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 20'000);
  EXPECT_NE(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(ConnectionAcceptorTest, AServerThatStartsAnewHasItsPort) {
  Listen(1);
  const HostPort address = acceptor_->address();
  ASSERT_TRUE(ConnectIsGreeted());
  CloseTaken();  // the server ends first: the system keeps the address for a minute
  char byte = 0;
  EXPECT_EQ(read(clients_.back(), &byte, 1), 0);
  close(clients_.back());
  clients_.clear();
  acceptor_.reset();
  const auto again = ConnectionAcceptor::Bind(address, 1);
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST_F(ConnectionAcceptorTest, AnEndKeepsNoDescriptor) {
  const FewDescriptors few(8);
  Listen(1);
  acceptor_.reset();
  EXPECT_EQ(FewDescriptors::CountFree(), 8);
}

// A server that can accept nobody any more is better started again than left running.
TEST_F(ConnectionAcceptorTest, AListenerThatIsGoneEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Listen(10);
        shutdown(acceptor_->listener(), SHUT_RD);
        sleep(60);
      },
      testing::ExitedWithCode(EXIT_FAILURE), "no connection can be accepted at 127.0.0.1:.* any more");
}

TEST(ConnectionAcceptorBind, WithoutDescriptorsItSaysSoAndKeepsNone) {
  for (const int free : {0, 1}) {
    const FewDescriptors few(free);
    const absl::Status status = ConnectionAcceptor::Bind({"127.0.0.1", 0}, 10).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("Too many open files"), absl::string_view::npos) << status;
    EXPECT_EQ(FewDescriptors::CountFree(), free);
  }
}

TEST_F(ConnectionAcceptorTest, EveryInterfaceIsBothFamilies) {
  Listen(10, "0.0.0.0");
  EXPECT_TRUE(ConnectIsGreeted());
  sockaddr_in6 peer{};
  peer.sin6_family = AF_INET6;
  peer.sin6_port = htons(acceptor_->address().port);
  peer.sin6_addr = in6addr_loopback;
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) GTEST_SKIP() << "no IPv6 here";
  clients_.push_back(fd);
  const bool connected = connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)) == 0;
  if (!connected && errno == EADDRNOTAVAIL) GTEST_SKIP() << "no IPv6 here";
  EXPECT_TRUE(connected && IsGreeted(fd));
}

TEST_F(ConnectionAcceptorTest, PortInUseIsSaid) {
  Listen(10);
  const auto second = ConnectionAcceptor::Bind(acceptor_->address(), 10);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(second.status().message()).find("choose another port"), std::string::npos);
}

}  // namespace
}  // namespace meshfill
