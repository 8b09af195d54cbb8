#include "server/listener/guarded_connections.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "tests/engine/few_descriptors.h"
#include "tests/server/listener/http2_frame.h"

namespace meshfill {
namespace {

constexpr int kWaitMilliseconds = 10'000;
constexpr int64_t kMostHeldBytes = 4 << 20;

// Connections as the server has them.
class Admitted {
 public:
  void Put(int server) {
    const MutexLock lock(mu_);
    servers_.push_back(server);
    came_.NotifyOne();
  }
  // The next one; -1: none comes.
  int Take(absl::Duration patience = absl::Milliseconds(kWaitMilliseconds)) {
    const absl::Time deadline = MonotonicNow() + patience;
    const MutexLock lock(mu_);
    while (servers_.empty() && MonotonicNow() < deadline) came_.WaitUntil(mu_, deadline);
    if (servers_.empty()) return -1;
    const int server = servers_.front();
    servers_.pop_front();
    return server;
  }

 private:
  Mutex mu_;
  CondVar came_;
  std::deque<int> servers_ ABSL_GUARDED_BY(mu_);
};

// The client's and the server's end of one connection.
class Ends {
 public:
  Ends(GuardedConnections& guard, Admitted& admitted) {
    std::array<int, 2> pair{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
    client = pair[0];
    fcntl(pair[1], F_SETFL, O_NONBLOCK);
    guard.Add(pair[1]);
    server = admitted.Take();
    EXPECT_GE(server, 0);
    fcntl(server, F_SETFL, 0);
    Write(client, Bytes(24, 'P'));
    EXPECT_EQ(Read(server, 24).size(), 24);
  }
  ~Ends() {
    close(client);
    close(server);
  }

  static void Write(int fd, const Bytes& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t sent = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return;
      at += static_cast<size_t>(sent);
    }
  }
  // So many bytes, or fewer where the other side ends.
  static Bytes Read(int fd, size_t count) {
    Bytes bytes(count);
    size_t at = 0;
    while (at < count) {
      pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
      if (poll(&ready, 1, kWaitMilliseconds) != 1) {
        ADD_FAILURE() << "nothing came for 10 s";
        break;
      }
      const ssize_t got = read(fd, bytes.data() + at, count - at);
      if (got <= 0) break;
      at += static_cast<size_t>(got);
    }
    bytes.resize(at);
    return bytes;
  }

  int client = -1, server = -1;
};

class GuardedConnectionsTest : public testing::Test {
 protected:
  void SetUp() override {
    auto guard = GuardedConnections::Start("the test", ServerTransport(),
                                           {.most_streams = 16, .most_held_bytes = kMostHeldBytes},
                                           [this](int server) { admitted_.Put(server); });
    ASSERT_TRUE(guard.ok()) << guard.status();
    guard_ = *std::move(guard);
  }
  Admitted admitted_;
  std::unique_ptr<GuardedConnections> guard_;
};

TEST_F(GuardedConnectionsTest, PassesAllBytesOnBothWays) {
  constexpr size_t kBytes = 20 << 20;
  std::mt19937 random(std::random_device{}());
  Bytes sent(kBytes);
  for (uint8_t& byte : sent) byte = static_cast<uint8_t>(random());
  Ends ends(*guard_, admitted_);
  // A frame of a type that nobody knows, of whatever bytes.
  Bytes framed;
  for (size_t at = 0; at < kBytes; at += 16'000) {
    const size_t end = std::min(kBytes, at + 16'000);
    const Bytes frame = Frame(0xbb, 0, 1, Bytes(sent.begin() + at, sent.begin() + end));
    framed.insert(framed.end(), frame.begin(), frame.end());
  }
  std::thread up([&] { Ends::Write(ends.client, framed); });
  std::thread down([&] { Ends::Write(ends.server, framed); });
  Bytes at_client;
  std::thread reader([&] { at_client = Ends::Read(ends.client, framed.size()); });
  EXPECT_EQ(Ends::Read(ends.server, framed.size()), framed);
  for (std::thread* thread : {&up, &down, &reader}) thread->join();
  EXPECT_EQ(at_client, framed);
}

// Who comes once the server takes nobody any more is hung up on; who was there is served on.
TEST_F(GuardedConnectionsTest, NobodyIsAdmittedAfterStopAdmitting) {
  Ends ends(*guard_, admitted_);
  guard_->StopAdmitting();
  std::array<int, 2> pair{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
  fcntl(pair[1], F_SETFL, O_NONBLOCK);
  guard_->Add(pair[1]);
  EXPECT_TRUE(Ends::Read(pair[0], 1).empty());
  close(pair[0]);
  EXPECT_EQ(admitted_.Take(absl::ZeroDuration()), -1);
  Ends::Write(ends.client, {1, 2, 3});
  EXPECT_EQ(Ends::Read(ends.server, 3), (Bytes{1, 2, 3}));
}

TEST_F(GuardedConnectionsTest, EndsPassOn) {
  for (const bool client_first : {true, false}) {
    Ends ends(*guard_, admitted_);
    const int first = client_first ? ends.client : ends.server;
    const int second = client_first ? ends.server : ends.client;
    Ends::Write(first, {1, 2, 3});
    shutdown(first, SHUT_WR);
    EXPECT_EQ(Ends::Read(second, 100), (Bytes{1, 2, 3}));
    Ends::Write(second, {4, 5});  // the other direction lives
    shutdown(second, SHUT_WR);
    EXPECT_EQ(Ends::Read(first, 100), (Bytes{4, 5}));
  }
}

TEST_F(GuardedConnectionsTest, AClosedSocketClosesTheOther) {
  for (const bool client_first : {true, false}) {
    Ends ends(*guard_, admitted_);
    int& first = client_first ? ends.client : ends.server;
    close(std::exchange(first, -1));
    EXPECT_TRUE(Ends::Read(client_first ? ends.server : ends.client, 1).empty());
  }
}

// A client that does not end its side once the server has gives its place back.
TEST_F(GuardedConnectionsTest, ASilentClientIsClosedOnceTheServerHasEnded) {
  constexpr absl::Duration kLast = absl::Milliseconds(500);
  auto guard =
      GuardedConnections::Start("the test", ServerTransport(),
                                {.most_streams = 16, .most_held_bytes = kMostHeldBytes, .last_time = kLast},
                                [this](int server) { admitted_.Put(server); });
  ASSERT_TRUE(guard.ok()) << guard.status();
  Ends ends(**guard, admitted_);
  Ends::Write(ends.server, {1, 2, 3});
  const absl::Time begin = MonotonicNow();
  close(std::exchange(ends.server, -1));
  EXPECT_EQ(Ends::Read(ends.client, 100), (Bytes{1, 2, 3}));
  pollfd gone{.fd = ends.client, .events = 0, .revents = 0};
  EXPECT_EQ(poll(&gone, 1, kWaitMilliseconds), 1) << "it stays for ever";
  EXPECT_NE(gone.revents & POLLHUP, 0);
  EXPECT_GE(MonotonicNow() - begin, kLast);
}

// What the server has sent last arrives, though the port closes.
TEST_F(GuardedConnectionsTest, LastWordsArrive) {
  Ends ends(*guard_, admitted_);
  Ends::Write(ends.server, {7, 8, 9});
  close(std::exchange(ends.server, -1));
  guard_.reset();
  EXPECT_EQ(Ends::Read(ends.client, 100), (Bytes{7, 8, 9}));
}

TEST_F(GuardedConnectionsTest, ClosingTakesAMoment) {
  Ends ends(*guard_, admitted_);
  const absl::Time begin = MonotonicNow();
  guard_.reset();
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(5));
  EXPECT_TRUE(Ends::Read(ends.client, 1).empty());
}

// Whoever holds most goes; another, who holds less, is served on.
TEST_F(GuardedConnectionsTest, TheLargestHolderIsHungUpOn) {
  Ends small(*guard_, admitted_), large(*guard_, admitted_);
  const auto begin_message = [](Ends& ends, int pieces) {
    Bytes bytes = Frame(1, 0, 1, Bytes(10));
    const Bytes head = Frame(0, 0, 1, {0, 0x7f, 0, 0, 0});
    bytes.insert(bytes.end(), head.begin(), head.end());
    const Bytes piece = Frame(0, 0, 1, Bytes(16'000));
    for (int i = 0; i < pieces; ++i) bytes.insert(bytes.end(), piece.begin(), piece.end());
    Ends::Write(ends.client, bytes);
    return bytes.size();
  };
  const size_t small_size = begin_message(small, 20);
  EXPECT_EQ(Ends::Read(small.server, small_size).size(), small_size);
  std::thread writer([&] { begin_message(large, kMostHeldBytes / 16'000 + 200); });
  Bytes got;
  while (!(got = Ends::Read(large.server, 1 << 16)).empty()) {
  }
  writer.join();
  const Bytes goaway = Ends::Read(large.client, 100);
  ASSERT_EQ(goaway.size(), 17);
  EXPECT_EQ(goaway[3], 7) << "no GOAWAY";
  EXPECT_EQ(goaway[16], 11) << "not ENHANCE_YOUR_CALM";
  Ends::Write(small.client, {1, 2, 3});
  EXPECT_EQ(Ends::Read(small.server, 3).size(), 3);
}

// A client that is in the midst of a frame of the server's would take a GOAWAY for its rest.
TEST_F(GuardedConnectionsTest, HalfAFrameIsTheLast) {
  Ends ends(*guard_, admitted_);
  const Bytes half(12, 0);  // three bytes more than a head of no payload: a second head has begun
  Ends::Write(ends.server, half);
  EXPECT_EQ(Ends::Read(ends.client, half.size()).size(), half.size());
  Bytes block = Frame(1, 0, 1, Bytes(16'000));
  for (int i = 0; i < 5; ++i) {
    const Bytes more = Frame(9, 0, 1, Bytes(16'000));
    block.insert(block.end(), more.begin(), more.end());
  }
  Ends::Write(ends.client, block);
  EXPECT_TRUE(Ends::Read(ends.client, 1).empty());
}

// Answers that a client does not read are held, too.
TEST_F(GuardedConnectionsTest, WhatAClientDoesNotReadCounts) {
  auto guard =
      GuardedConnections::Start("the test", ServerTransport(), {.most_streams = 16, .most_held_bytes = 1000},
                                [this](int server) { admitted_.Put(server); });
  ASSERT_TRUE(guard.ok()) << guard.status();
  const Ends ends(**guard, admitted_);
  const timeval patience{.tv_sec = 10, .tv_usec = 0};
  setsockopt(ends.server, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  Ends::Write(ends.server, Frame(0xbb, 0, 1, Bytes(8 << 20)));  // more than the sockets hold
  const ssize_t sent = send(ends.server, "x", 1, MSG_NOSIGNAL);
  const int error = errno;
  EXPECT_TRUE(sent < 0 && (error == EPIPE || error == ECONNRESET)) << "it was not hung up on: " << error;
}

// Resets come to the server at their pace, and nothing of the connection is lost.
TEST_F(GuardedConnectionsTest, ResetsArrivePaced) {
  Ends ends(*guard_, admitted_);
  Bytes bytes;
  constexpr int kResets = 400;
  for (uint32_t i = 0; i < kResets; ++i) {
    for (const Bytes& frame : {Frame(1, 0, 2 * i + 1, Bytes(100)), Frame(3, 0, 2 * i + 1, Bytes(4))}) {
      bytes.insert(bytes.end(), frame.begin(), frame.end());
    }
  }
  const absl::Time begin = MonotonicNow();
  std::thread writer([&] {
    for (int round = 0; round < 2; ++round) Ends::Write(ends.client, round == 0 ? bytes : Bytes{1, 2, 3});
  });
  EXPECT_EQ(Ends::Read(ends.server, bytes.size()), bytes);
  writer.join();
  Ends::Write(ends.client, Bytes(10));
  EXPECT_EQ(Ends::Read(ends.server, 13).size(), 13);
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(500)) << "200 at once, 200 a second";
}

// A connection takes two descriptors more.
TEST_F(GuardedConnectionsTest, AConnectionWithoutDescriptorsIsRefused) {
  std::array<int, 2> pair{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()), 0);
  {
    const FewDescriptors few(1);
    guard_->Add(pair[1]);
    EXPECT_EQ(Ends::Read(pair[0], 1).size(), 0) << "it is closed";
  }
  close(pair[0]);
  const Ends next(*guard_, admitted_);  // and others are taken when there is room again
  Ends::Write(next.client, Bytes{1, 2, 3});
  EXPECT_EQ(Ends::Read(next.server, 3), (Bytes{1, 2, 3}));
}

TEST(GuardedConnectionsStart, WithoutDescriptorsItSaysSoAndKeepsNone) {
  for (const int free : {0, 1}) {
    const FewDescriptors few(free);
    const absl::Status status =
        GuardedConnections::Start("the test", ServerTransport(), {}, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("raise ulimit -n"), absl::string_view::npos) << status;
    EXPECT_EQ(FewDescriptors::CountFree(), free);
  }
}

}  // namespace
}  // namespace meshfill
