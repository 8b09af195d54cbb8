// Who gets in where ranks meet: each rank here meets a stranger that plays the other side byte by byte.
#include "engine/comm/gloo/gloo_rendezvous.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/comm/gloo/gloo_ranks.h"
#include "tests/engine/few_descriptors.h"

namespace meshfill {
namespace {

// Where the test looks into an address, which is opaque to everybody else.
constexpr size_t kMagicBytes = 8, kRunBytes = 8, kSecretOffset = 24, kSecretBytes = 16, kSocketOffset = 40;
constexpr size_t kSocketLengthOffset = 168, kKeyOffset = 184, kKeyBytes = 32;
constexpr size_t kHelloBytes = 56, kWelcomeBytes = 24;
constexpr int kRanks = 2;

std::string SecretOf(const std::string& address) { return address.substr(kSecretOffset, kSecretBytes); }

std::unique_ptr<GlooRendezvous> Listen(int rank, GlooRendezvous::Options options = {}) {
  options.listen = "lo";
  options.rank = rank;
  options.ranks = kRanks;
  options.run = 7;
  return GlooRendezvous::Listen(options).value();
}

// What rank `from` of the two addresses says to rank 0.
std::string HelloOf(const std::vector<std::string>& addresses, uint32_t from) {
  const uint32_t to = 0;
  std::string hello = addresses[0].substr(0, kMagicBytes + kRunBytes);
  hello.append(reinterpret_cast<const char*>(&from), sizeof(from));
  hello.append(reinterpret_cast<const char*>(&to), sizeof(to));
  return hello + SecretOf(addresses[from]) + SecretOf(addresses[0]);
}

// A connection that a test plays.
class Stranger {
 public:
  explicit Stranger(const std::string& address) : Stranger(socket(AF_INET, SOCK_STREAM, 0), address) {}
  Stranger(int fd, const std::string& address) : fd_(fd) {
    sockaddr_in to;
    std::memcpy(&to, address.data() + kSocketOffset, sizeof(to));
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0;
  }
  explicit Stranger(int fd) : fd_(fd), connected_(fd >= 0) {}
  ~Stranger() { close(fd_); }
  Stranger(const Stranger&) = delete;

  bool connected() const { return connected_; }
  void Say(const std::string& bytes) const { send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // Up to `bytes` bytes, fewer where the other side hangs up before. Waits for up to 30 seconds.
  std::string Hear(size_t bytes) const {
    std::string heard;
    pollfd polled = {.fd = fd_, .events = POLLIN, .revents = 0};
    while (heard.size() < bytes && poll(&polled, 1, 30'000) == 1) {
      char more[256];
      const ssize_t count = recv(fd_, more, std::min(sizeof(more), bytes - heard.size()), 0);
      if (count <= 0) break;
      heard.append(more, static_cast<size_t>(count));
    }
    return heard;
  }
  // Whether the other side has hung up; waits for it for up to 30 seconds.
  bool IsDropped() const {
    char byte;
    pollfd polled = {.fd = fd_, .events = POLLIN, .revents = 0};
    return poll(&polled, 1, 30'000) == 1 && recv(fd_, &byte, 1, 0) <= 0;
  }
  bool IsDroppedAlready() const {
    char byte;
    const ssize_t count = recv(fd_, &byte, 1, MSG_DONTWAIT);
    return count == 0 || (count < 0 && errno != EAGAIN);
  }

 private:
  const int fd_;
  bool connected_ = false;
};

// A port where a test listens in a rank's place.
class Listener {
 public:
  Listener() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    here_.sin_family = AF_INET;
    here_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(here_);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&here_), length), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&here_), &length), 0);
  }
  ~Listener() { close(fd_); }
  Listener(const Listener&) = delete;

  // A rank's address with this port in it.
  std::string InsteadOf(std::string address) const {
    std::memcpy(address.data() + kSocketOffset, &here_, sizeof(here_));
    return address;
  }
  int Accept() const { return accept(fd_, nullptr, nullptr); }

 private:
  const int fd_;
  sockaddr_in here_ = {};
};

// Rank 0 that waits for rank 1, whom the test plays. Ends with the meeting.
class RankZero {
 public:
  explicit RankZero(const GlooRendezvous::Options& options = {})
      : rank0_(Listen(0, options)), rank1_(Listen(1, options)) {
    addresses = {rank0_->address(), rank1_->address()};
    thread_ = std::thread([this] { result_ = rank0_->Connect(addresses, Soon()).status(); });
  }
  ~RankZero() {
    rank0_->Interrupt();
    if (thread_.joinable()) thread_.join();
  }
  absl::Status Result() {
    thread_.join();
    return result_;
  }

  // Rank 1 itself comes, with what it takes for the addresses.
  absl::Status MeetRankOne(const std::vector<std::string>& by_rank) {
    return rank1_->Connect(by_rank, Soon()).status();
  }

  std::vector<std::string> addresses;

 private:
  const std::unique_ptr<GlooRendezvous> rank0_, rank1_;
  absl::Status result_;
  std::thread thread_;
};

TEST(GlooRendezvous, EachByteOfAHelloMustBeRight) {
  RankZero rank0;
  const std::string hello = HelloOf(rank0.addresses, 1);
  ASSERT_EQ(hello.size(), kHelloBytes);
  for (size_t i = 0; i < kHelloBytes; ++i) {
    std::string wrong = hello;
    wrong[i] = static_cast<char>(wrong[i] ^ 0x40);
    const Stranger stranger(rank0.addresses[0]);
    stranger.Say(wrong);
    EXPECT_EQ(stranger.Hear(kWelcomeBytes), "") << "byte " << i;
  }
  const Stranger itself(rank0.addresses[0]);
  itself.Say(HelloOf(rank0.addresses, 0));
  EXPECT_EQ(itself.Hear(kWelcomeBytes), "") << "a rank meets no rank below the one above it";

  const Stranger peer(rank0.addresses[0]);
  peer.Say(hello);
  EXPECT_EQ(peer.Hear(kWelcomeBytes), hello.substr(0, kMagicBytes) + SecretOf(rank0.addresses[1]));
  EXPECT_TRUE(rank0.Result().ok());
}

TEST(GlooRendezvous, AHelloMayComeInPieces) {
  RankZero rank0;
  const std::string hello = HelloOf(rank0.addresses, 1);
  const Stranger peer(rank0.addresses[0]);
  for (const size_t begin : {0, 20, 40}) {
    peer.Say(hello.substr(begin, 20));
    const Stranger other(rank0.addresses[0]);  // once it is dropped, what came before has been read
    other.Say(std::string(kHelloBytes, 'x'));
    if (begin < 40) {
      ASSERT_TRUE(other.IsDropped());
    }
  }
  EXPECT_EQ(peer.Hear(kWelcomeBytes).size(), kWelcomeBytes);
  EXPECT_TRUE(rank0.Result().ok());
}

// Of those that say nothing 512 are kept: the oldest go first.
TEST(GlooRendezvous, SilentStrangersAreBounded) {
  constexpr int kSilent = 600, kKept = 512;
  RankZero rank0;
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < kSilent; ++i) {
    silent.push_back(std::make_unique<Stranger>(rank0.addresses[0]));
    ASSERT_TRUE(silent.back()->connected()) << i;
  }
  const Stranger last(rank0.addresses[0]);  // accepted behind all of them
  last.Say(std::string(kHelloBytes, 'x'));
  ASSERT_TRUE(last.IsDropped());
  int dropped = 0;
  for (const auto& stranger : silent) dropped += stranger->IsDroppedAlready() ? 1 : 0;
  EXPECT_GE(dropped, kSilent - kKept);
  EXPECT_TRUE(silent.front()->IsDroppedAlready());
}

// Where no descriptor is free for another connection, the oldest that says nothing makes room, and nobody
// else.
TEST(GlooRendezvous, APeerComesThroughWhereAStrangerHoldsTheLastDescriptor) {
  GlooRendezvous::Options options;
  options.hello_timeout = absl::Minutes(10);
  RankZero rank0(options);
  const Stranger silent(rank0.addresses[0]);
  {
    const Stranger last(rank0.addresses[0]);  // accepted behind it
    last.Say(std::string(kHelloBytes, 'x'));
    ASSERT_TRUE(last.IsDropped());
  }
  const int unconnected = socket(AF_INET, SOCK_STREAM, 0);
  std::optional<FewDescriptors> none(0);
  const Stranger peer(unconnected, rank0.addresses[0]);
  EXPECT_TRUE(peer.connected());
  EXPECT_TRUE(silent.IsDropped());
  const std::string hello = HelloOf(rank0.addresses, 1);
  for (const char byte : hello) peer.Say(std::string(1, byte));
  EXPECT_EQ(peer.Hear(kWelcomeBytes).size(), kWelcomeBytes) << "the peer has been dropped in its turn";
  none.reset();
  EXPECT_TRUE(rank0.Result().ok());
}

TEST(GlooRendezvous, WhoSaysNothingIsDroppedAfterATime) {
  GlooRendezvous::Options options;
  options.hello_timeout = absl::Milliseconds(1);
  RankZero rank0(options);
  const Stranger silent(rank0.addresses[0]);
  EXPECT_TRUE(silent.IsDropped());
}

// Who knows the secrets, and stops within the TLS handshake, is dropped as well.
TEST(GlooRendezvous, WhoStopsInTheHandshakeIsDroppedAfterATime) {
  GlooRendezvous::Options options;
  options.encrypt = true;
  options.hello_timeout = absl::Milliseconds(1);
  RankZero rank0(options);
  std::string welcome;
  const auto peer = [&] {  // a busy machine may drop it before its hello has come
    auto stranger = std::make_unique<Stranger>(rank0.addresses[0]);
    stranger->Say(HelloOf(rank0.addresses, 1));
    welcome = stranger->Hear(kWelcomeBytes);
    return stranger;
  };
  std::unique_ptr<Stranger> stranger = peer();
  while (welcome.empty()) stranger = peer();
  EXPECT_TRUE(stranger->IsDropped());
}

// The key of a connection is of both ends' keys: who knows one of them alone does not get in.
TEST(GlooRendezvous, BothKeysMustBeRight) {
  for (const int rank : {0, 1}) {
    RankZero rank0({.encrypt = true});
    std::vector<std::string> wrong = rank0.addresses;
    wrong[rank][kKeyOffset] = static_cast<char>(wrong[rank][kKeyOffset] ^ 1);
    ExpectStatus(rank0.MeetRankOne(wrong), absl::StatusCode::kUnavailable, {"rank 1", "rank 0", "key"});
  }
  RankZero rank0({.encrypt = true});
  EXPECT_TRUE(rank0.MeetRankOne(rank0.addresses).ok());
}

// Rank 1 calls a port where somebody else listens, who has read the hello.
TEST(GlooRendezvous, EachByteOfAWelcomeMustBeRight) {
  const Listener listener;
  for (size_t i = 0; i <= kWelcomeBytes; ++i) {
    const auto rank0 = Listen(0), rank1 = Listen(1);
    std::vector<std::string> addresses = {listener.InsteadOf(rank0->address()), rank1->address()};
    absl::Status met;
    std::thread connect([&] { met = rank1->Connect(addresses, Soon()).status(); });
    const Stranger caller(listener.Accept());
    const std::string hello = caller.Hear(kHelloBytes);
    std::string welcome = hello.substr(0, kMagicBytes) + SecretOf(addresses[1]);
    if (i < kWelcomeBytes) welcome[i] = static_cast<char>(welcome[i] ^ 1);
    caller.Say(welcome);
    connect.join();
    if (i == kWelcomeBytes) {
      EXPECT_TRUE(met.ok()) << met;
    } else {
      ExpectStatus(met, absl::StatusCode::kUnavailable, {"rank 1", "rank 0", "something else answers"});
    }
  }
}

// It calls from the address that its data is to take.
TEST(GlooRendezvous, CallsFromTheInterfaceThatIsNamed) {
  const Listener listener;
  const auto rank0 = Listen(0);
  const auto rank1 =
      GlooRendezvous::Listen({.listen = "127.0.0.2", .rank = 1, .ranks = kRanks, .run = 7}).value();
  std::thread connect([&] {
    rank1->Connect(std::vector<std::string>{listener.InsteadOf(rank0->address()), rank1->address()}, Soon())
        .IgnoreError();
  });
  sockaddr_in from = {};
  {
    const int fd = listener.Accept();
    const Stranger caller(fd);
    socklen_t length = sizeof(from);
    EXPECT_EQ(getpeername(fd, reinterpret_cast<sockaddr*>(&from), &length), 0);
  }
  connect.join();
  EXPECT_EQ(ntohl(from.sin_addr.s_addr), INADDR_LOOPBACK + 1);
}

// Who answers as rank 0 would, and then hangs up instead of a handshake, is named.
TEST(GlooRendezvous, WhoHangsUpInTheHandshakeIsNamed) {
  const Listener listener;
  const auto rank0 = Listen(0, {.encrypt = true}), rank1 = Listen(1, {.encrypt = true});
  std::vector<std::string> addresses = {listener.InsteadOf(rank0->address()), rank1->address()};
  absl::Status met;
  std::thread connect([&] { met = rank1->Connect(addresses, Soon()).status(); });
  {
    const Stranger caller(listener.Accept());
    const std::string hello = caller.Hear(kHelloBytes);
    caller.Say(hello.substr(0, kMagicBytes) + SecretOf(addresses[1]));
    EXPECT_NE(caller.Hear(1), "") << "the handshake begins";
  }
  connect.join();
  ExpectStatus(met, absl::StatusCode::kUnavailable, {"rank 1", "rank 0", "hung up in the TLS handshake"});
}

// Who is busy in the handshake is waited for, longer than a stranger that says nothing.
TEST(GlooRendezvous, ASlowPeerIsNotGivenUpByItsCaller) {
  const Listener listener;
  const auto rank0 = Listen(0, {.encrypt = true});
  const auto rank1 = Listen(1, {.encrypt = true, .hello_timeout = absl::Milliseconds(1)});
  std::vector<std::string> addresses = {listener.InsteadOf(rank0->address()), rank1->address()};
  absl::Status met;
  std::thread connect([&] { met = rank1->Connect(addresses, Soon()).status(); });
  {
    const Stranger caller(listener.Accept());
    const std::string hello = caller.Hear(kHelloBytes);
    caller.Say(hello.substr(0, kMagicBytes) + SecretOf(addresses[1]));
    EXPECT_NE(caller.Hear(1), "") << "the handshake begins";
    const Stranger silent(addresses[1]);
    EXPECT_TRUE(silent.IsDropped()) << "that long the peer has taken, too";
  }
  connect.join();  // it hears what becomes of the call
  ExpectStatus(met, absl::StatusCode::kUnavailable, {"rank 1", "rank 0", "hung up in the TLS handshake"});
}

// Rank 0 has met rank 1, and waits for rank 2: who repeats rank 1's hello takes nobody's place.
TEST(GlooRendezvous, AHelloCountsOnce) {
  std::vector<std::unique_ptr<GlooRendezvous>> ranks;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(GlooRendezvous::Listen({.listen = "lo", .rank = rank, .ranks = 3, .run = 7}).value());
    addresses.push_back(ranks.back()->address());
  }
  absl::StatusOr<std::vector<PeerSocket>> met = absl::UnknownError("");
  std::thread connect([&] { met = ranks[0]->Connect(addresses, Soon()); });
  const Stranger first(addresses[0]), second(addresses[0]), last(addresses[0]);
  first.Say(HelloOf(addresses, 1));
  EXPECT_EQ(first.Hear(kWelcomeBytes).size(), kWelcomeBytes);
  second.Say(HelloOf(addresses, 1));
  EXPECT_EQ(second.Hear(kWelcomeBytes), "");
  last.Say(HelloOf(addresses, 2));
  EXPECT_EQ(last.Hear(kWelcomeBytes).size(), kWelcomeBytes);
  connect.join();
  ASSERT_TRUE(met.ok()) << met.status();
  first.Say("x");
  char byte = 0;
  pollfd polled = {.fd = (*met)[1].socket.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&polled, 1, 30'000), 1);
  EXPECT_EQ(recv((*met)[1].socket.get(), &byte, 1, 0), 1);
}

TEST(GlooRendezvous, SecretsAndKeysAreDrawn) {
  for (const bool encrypt : {false, true}) {
    const std::string one = Listen(0, {.encrypt = encrypt})->address();
    const std::string other = Listen(0, {.encrypt = encrypt})->address();
    EXPECT_NE(SecretOf(one), SecretOf(other));
    EXPECT_NE(SecretOf(one), std::string(kSecretBytes, 0));
    const std::string key = one.substr(kKeyOffset, kKeyBytes);
    EXPECT_EQ(key != std::string(kKeyBytes, 0), encrypt);
    EXPECT_EQ(key != other.substr(kKeyOffset, kKeyBytes), encrypt);
  }
}

TEST(GlooRendezvous, AddressesAreThoseOfTheRanks) {
  const std::string good = Listen(1)->address();
  EXPECT_TRUE(CheckGlooAddress(good, 7, 1, false).ok());
  const auto refused = [&](const std::string& address, uint64_t run, int rank, bool encrypt,
                           const std::string& what) {
    ExpectStatus(CheckGlooAddress(address, run, rank, encrypt), absl::StatusCode::kInvalidArgument, {what});
  };
  refused(good.substr(1), 7, 1, false, "is none");
  refused(good, 8, 1, false, "is of run 7");
  refused(good, 7, 0, false, "is of rank 1");
  refused(good, 7, 1, true, "does not encrypt");
  refused(Listen(1, {.encrypt = true})->address(), 7, 1, false, "encrypts");
  std::string long_socket = good;
  long_socket[kSocketLengthOffset] = static_cast<char>(129);
  refused(long_socket, 7, 1, false, "is malformed");
  const auto rank0 = Listen(0);
  ExpectStatus(rank0->Connect(std::vector<std::string>{rank0->address(), good, good}, Soon()).status(),
               absl::StatusCode::kInvalidArgument, {"3 addresses for 2 ranks"});
}

// Of attempts in which the machine may stand still, the shortest counts.
TEST(GlooRendezvous, AWaitForAPeerEndsAtItsDeadline) {
  absl::Duration shortest = absl::InfiniteDuration();
  for (int attempt = 0; attempt < 5 && shortest > absl::Milliseconds(500); ++attempt) {
    const auto rank0 = Listen(0), rank1 = Listen(1);
    const std::vector<std::string> addresses = {rank0->address(), rank1->address()};
    const absl::Time start = MonotonicNow();
    ExpectStatus(rank0->Connect(addresses, start + absl::Milliseconds(50)).status(),
                 absl::StatusCode::kDeadlineExceeded, {"rank 0", "rank 1"});
    shortest = std::min(shortest, MonotonicNow() - start);
  }
  EXPECT_GE(shortest, absl::Milliseconds(50));
  EXPECT_LT(shortest, absl::Milliseconds(500));
}

TEST(GlooRendezvous, ListensOnOneInterfaceAlone) {
  for (const char* every : {"0.0.0.0", "::"}) {
    ExpectStatus(GlooRendezvous::Listen({.listen = every}).status(), absl::StatusCode::kInvalidArgument,
                 {"every interface"});
  }
}

}  // namespace
}  // namespace meshfill
