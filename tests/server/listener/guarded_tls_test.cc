// A port that ends TLS: who gets in, as whom, and that the guard stands behind it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "server/access/peer_names.h"
#include "server/access/transport.h"
#include "server/listener/guarded_connections.h"
#include "server/observe/log.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/listener/http2_frame.h"

namespace meshfill {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr int64_t kMostHeldBytes = 4 << 20;
constexpr size_t kPrefaceBytes = 24;

Bytes Random(size_t count) {
  std::mt19937 random(std::random_device{}());
  Bytes bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// A socket that gives up after kPatience.
int Patient(int fd) {
  const timeval patience{.tv_sec = 20, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  return fd;
}

// A client's end of TLS, which blocks.
class Client {
 public:
  struct Kind {
    const TestCertificates* trusted = nullptr;
    const TestCertificates* own = nullptr;  // who signed its certificate; null: it has none
    std::string name = "client";
    int version = 0;            // 0: the newest
    std::string alpn = "\2h2";  // lengths and names; "": none
    std::string ciphers = "";   // of TLS 1.2; "": OpenSSL's choice
  };

  Client(int fd, const Kind& kind) : fd_(Patient(fd)), context_(SSL_CTX_new(TLS_client_method())) {
    std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to sockets that may be closed
    SSL_CTX_set_max_proto_version(context_.get(), kind.version);
    if (!kind.ciphers.empty()) SSL_CTX_set_cipher_list(context_.get(), kind.ciphers.c_str());
    SSL_CTX_load_verify_locations(context_.get(), kind.trusted->Path("ca.pem").c_str(), nullptr);
    SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER, nullptr);
    if (kind.own != nullptr) {
      const v1::ApiSection::Tls files = kind.own->Tls(kind.name);
      SSL_CTX_use_certificate_file(context_.get(), files.cert().c_str(), SSL_FILETYPE_PEM);
      SSL_CTX_use_PrivateKey_file(context_.get(), files.key().c_str(), SSL_FILETYPE_PEM);
    }
    ssl_.reset(SSL_new(context_.get()));
    if (!kind.alpn.empty()) {
      SSL_set_alpn_protos(ssl_.get(), reinterpret_cast<const unsigned char*>(kind.alpn.data()),
                          static_cast<unsigned>(kind.alpn.size()));
    }
    SSL_set_fd(ssl_.get(), fd_);
    connected_ = SSL_connect(ssl_.get()) == 1;
  }
  ~Client() { close(fd_); }

  bool connected() const { return connected_; }  // as the client sees it
  int version() const { return SSL_version(ssl_.get()); }
  bool MayResume() const { return SSL_SESSION_is_resumable(SSL_get0_session(ssl_.get())) == 1; }
  void Write(const Bytes& bytes) {
    size_t sent = 0;
    SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &sent);
  }
  // So many bytes, or fewer where the other side ends.
  Bytes Read(size_t count) {
    Bytes bytes(count);
    size_t at = 0, got = 0;
    while (at < count && SSL_read_ex(ssl_.get(), bytes.data() + at, count - at, &got) == 1) at += got;
    bytes.resize(at);
    return bytes;
  }
  void EndSending() { SSL_shutdown(ssl_.get()); }

 private:
  const int fd_;
  const TlsContext context_;
  TlsConnection ssl_;
  bool connected_ = false;
};

class GuardedTlsTest : public testing::Test {
 protected:
  void Start(bool client_certificates) {
    v1::ApiSection::Tls tls = made_.Tls("api.example");
    tls.set_client_certificates(client_certificates);
    Start(tls);
  }
  void Start(const v1::ApiSection::Tls& tls) {
    auto transport = ApiServerTransport(tls, {.host = "127.0.0.1", .port = 1});
    ASSERT_TRUE(transport.ok()) << transport.status();
    transport_ = *std::move(transport);
    auto guard = GuardedConnections::Start(
        "the test", transport_,
        {.most_streams = 16, .most_held_bytes = kMostHeldBytes, .handshake_time = handshake_time_},
        [this](int server) {
          const MutexLock lock(mu_);
          servers_.push_back(server);
          came_.NotifyOne();
        });
    ASSERT_TRUE(guard.ok()) << guard.status();
    guard_ = *std::move(guard);
  }
  // A client's socket whose other end the guard has.
  int Connect() {
    std::array<int, 2> pair{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
    EXPECT_EQ(fcntl(pair[1], F_SETFL, O_NONBLOCK), 0);
    guard_->Add(pair[1]);
    return pair[0];
  }
  // The server's end of the next connection, past the preface; -1: none comes.
  int Admitted(absl::Duration patience = kPatience) {
    const absl::Time deadline = MonotonicNow() + patience;
    int server = -1;
    {
      const MutexLock lock(mu_);
      while (servers_.empty() && MonotonicNow() < deadline) came_.WaitUntil(mu_, deadline);
      if (servers_.empty()) return -1;
      server = servers_.front();
      servers_.pop_front();
    }
    fcntl(server, F_SETFL, 0);
    return Patient(server);
  }
  static Bytes Read(int fd, size_t count) {
    Bytes bytes(count);
    size_t at = 0;
    while (at < count) {
      const ssize_t got = read(fd, bytes.data() + at, count - at);
      if (got <= 0) break;
      at += static_cast<size_t>(got);
    }
    bytes.resize(at);
    return bytes;
  }
  static void Write(int fd, const Bytes& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t sent = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return;
      at += static_cast<size_t>(sent);
    }
  }
  // What gRPC calls the peer of this socket.
  static std::string PeerOf(int server) {
    sockaddr_un peer{};
    socklen_t size = sizeof(peer);
    getpeername(server, reinterpret_cast<sockaddr*>(&peer), &size);
    const size_t head = offsetof(sockaddr_un, sun_path) + 1;
    return size <= head ? "unix:"
                        : absl::StrCat("unix-abstract:", std::string(peer.sun_path + 1, size - head));
  }

  const TestCertificates made_, others_;
  absl::Duration handshake_time_ = kPatience;  // of the next Start
  ServerTransport transport_;
  Mutex mu_;
  CondVar came_;
  std::deque<int> servers_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<GuardedConnections> guard_;
};

TEST_F(GuardedTlsTest, PassesAllBytesOnBothWays) {
  Start(/*client_certificates=*/false);
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    Client client(Connect(), {.trusted = &made_, .version = version});
    ASSERT_TRUE(client.connected());
    EXPECT_EQ(client.version(), version);
    const int server = Admitted();
    ASSERT_GE(server, 0);
    EXPECT_EQ(PeerOf(server), "unix:") << "it has shown no certificate";
    client.Write(Bytes(kPrefaceBytes, 'P'));
    EXPECT_EQ(Read(server, kPrefaceBytes).size(), kPrefaceBytes);
    Bytes framed;
    for (int i = 0; i < 700; ++i) {  // frames of a type that nobody knows
      const Bytes frame = Frame(0xbb, 0, 1, Random(16'000));
      framed.insert(framed.end(), frame.begin(), frame.end());
    }
    // One way after the other: a client of OpenSSL has one thread.
    std::thread up([&] { client.Write(framed); });
    EXPECT_EQ(Read(server, framed.size()), framed);
    up.join();
    std::thread down([&] { Write(server, framed); });
    EXPECT_EQ(client.Read(framed.size()), framed);
    down.join();
    close(server);
    EXPECT_TRUE(client.Read(1).empty());
  }
}

TEST_F(GuardedTlsTest, EndsPassOn) {
  Start(false);
  Client client(Connect(), {.trusted = &made_});
  const int server = Admitted();
  client.Write(Bytes(kPrefaceBytes, 'P'));
  client.EndSending();
  EXPECT_EQ(Read(server, 100).size(), kPrefaceBytes);
  Write(server, {4, 5});  // the other direction lives
  close(server);
  EXPECT_EQ(client.Read(100), (Bytes{4, 5}));
}

TEST_F(GuardedTlsTest, LastWordsArrive) {
  Start(false);
  Client client(Connect(), {.trusted = &made_});
  const int server = Admitted();
  Write(server, {7, 8, 9});
  close(server);
  guard_.reset();
  EXPECT_EQ(client.Read(100), (Bytes{7, 8, 9}));
}

TEST_F(GuardedTlsTest, NoStrangerReachesTheServer) {
  handshake_time_ = absl::Seconds(2);  // one of them says nothing
  Start(/*client_certificates=*/true);
  const std::vector<std::pair<std::string, Client::Kind>> strangers = {
      {"no certificate", {.trusted = &made_}},
      {"no certificate, TLS 1.2", {.trusted = &made_, .version = TLS1_2_VERSION}},
      {"another authority's", {.trusted = &made_, .own = &others_}},
      {"another authority's, TLS 1.2", {.trusted = &made_, .own = &others_, .version = TLS1_2_VERSION}},
      {"another protocol", {.trusted = &made_, .own = &made_, .alpn = "\x8http/1.1"}},
      {"no protocol", {.trusted = &made_, .own = &made_, .alpn = ""}},
      {"TLS 1.1", {.trusted = &made_, .own = &made_, .version = TLS1_1_VERSION}},
      {"a cipher that HTTP/2 forbids",
       {.trusted = &made_, .own = &made_, .version = TLS1_2_VERSION, .ciphers = "ECDHE-ECDSA-AES128-SHA"}},
      {"does not trust the server", {.trusted = &others_, .own = &made_}},
  };
  FlushLog();
  testing::internal::CaptureStderr();
  for (const auto& [what, kind] : strangers) {
    Client client(Connect(), kind);
    client.Write(Bytes(kPrefaceBytes, 'P'));
    EXPECT_TRUE(client.Read(1).empty()) << what;
  }
  for (const Bytes& plain : {Bytes(kPrefaceBytes, 'P'), Random(1 << 16), Bytes{}}) {
    const int fd = Patient(Connect());
    Write(fd, plain);
    Read(fd, 1 << 16);  // an alert, perhaps, and then the end
    close(fd);
  }
  EXPECT_EQ(Admitted(absl::ZeroDuration()), -1);
  Client known(Connect(), {.trusted = &made_, .own = &made_});
  EXPECT_GE(Admitted(), 0);
  FlushLog();
  const std::string log = testing::internal::GetCapturedStderr();
  for (const char* why : {"peer did not return a certificate", "unable to get local issuer certificate",
                          "the client does not say that it speaks HTTP/2 (ALPN)",
                          "wrong version number, as of a client in plain text"}) {
    EXPECT_NE(log.find(why), std::string::npos) << why << " is not in\n" << log;
  }
}

// Names that are no hosts' are whatever somebody asked an authority for.
TEST_F(GuardedTlsTest, OnlyItsHostsNamesAreACertificates) {
  Start(true);
  made_.Make("other",
             {.other_names = "email:ops.example,IP:127.0.0.1,DNS:first.example,URI:urn:x,DNS:second"});
  Client client(Connect(), {.trusted = &made_, .own = &made_, .name = "other"});
  EXPECT_EQ(transport_.peers->Of(PeerOf(Admitted())), (PeerNames::Names{"other", "first.example", "second"}));
}

// The file of authorities may have one between that and the root, whose root is not there.
TEST_F(GuardedTlsTest, AnAuthorityBetweenIsTrustedAlone) {
  const auto between_key = TestCertificates::MakeKey(0), key = TestCertificates::MakeKey(0);
  const auto between = made_.Sign("between", between_key, {.usage = "", .authority = true});
  made_.Write("under.key", TestCertificates::Pem(key));
  made_.Write("under.pem",
              TestCertificates::Pem(TestCertificates::Sign("under", key, {}, between, between_key)));
  v1::ApiSection::Tls tls = made_.Tls("api.example");
  tls.set_client_certificates(true);
  tls.set_ca(made_.Write("between.pem", TestCertificates::Pem(between)));
  Start(tls);
  Client client(Connect(), {.trusted = &made_, .own = &made_, .name = "under"});
  EXPECT_GE(Admitted(), 0);
}

// Nothing of a session is kept: neither here nor with the client.
TEST_F(GuardedTlsTest, SessionsAreNotTakenUpAgain) {
  Start(false);
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    Client client(Connect(), {.trusted = &made_, .version = version});
    const int server = Admitted();
    Write(server, {7});
    EXPECT_EQ(client.Read(1), (Bytes{7}));
    EXPECT_FALSE(client.MayResume()) << version;
    close(server);
  }
}

TEST_F(GuardedTlsTest, EachConnectionHasItsOwnCertificatesNames) {
  Start(true);
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<int> servers;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<Client>(
        Connect(), Client::Kind{.trusted = &made_, .own = &made_, .name = absl::StrCat("client", i)}));
    servers.push_back(Admitted());
  }
  std::vector<std::string> peers;
  for (size_t i = 0; i < servers.size(); ++i) {
    const std::string name = absl::StrCat("client", i);
    peers.push_back(PeerOf(servers[i]));
    EXPECT_EQ(transport_.peers->Of(peers[i]), (PeerNames::Names{name, name})) << "its common name, and DNS";
  }
  EXPECT_TRUE(transport_.peers->Of("").empty());
  EXPECT_TRUE(transport_.peers->Of("unix:").empty());
  EXPECT_TRUE(transport_.peers->Of("unix-abstract:meshfill-0").empty());
  EXPECT_TRUE(transport_.peers->Of(peers[0].substr(14)).empty());
  // Names go with their connection, and come back for no other one, also where its descriptor does.
  clients[0].reset();
  close(servers[0]);
  Client next(Connect(), {.trusted = &made_, .own = &made_, .name = "next"});
  const int server = Admitted();
  EXPECT_NE(PeerOf(server), peers[0]);
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (!transport_.peers->Of(peers[0]).empty() && MonotonicNow() < deadline)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_TRUE(transport_.peers->Of(peers[0]).empty());
  EXPECT_EQ(transport_.peers->Of(PeerOf(server)), (PeerNames::Names{"next", "next"}));
  EXPECT_EQ(transport_.peers->Of(peers[1]), (PeerNames::Names{"client1", "client1"}));
}

TEST_F(GuardedTlsTest, SilentHandshakesEndAndAreInNobodysWay) {
  handshake_time_ = absl::Seconds(2);
  Start(false);
  std::vector<int> silent;
  const absl::Time begin = MonotonicNow();
  for (int i = 0; i < 100; ++i) silent.push_back(Patient(Connect()));
  {
    Client client(Connect(), {.trusted = &made_});
    EXPECT_TRUE(client.connected());
    EXPECT_GE(Admitted(), 0);
  }
  for (const int fd : silent) {
    EXPECT_TRUE(Read(fd, 1).empty());
    close(fd);
  }
  EXPECT_GE(MonotonicNow() - begin, handshake_time_);
  EXPECT_LT(MonotonicNow() - begin, kPatience);
  EXPECT_EQ(Admitted(absl::ZeroDuration()), -1);
}

// The guard reads the frames that TLS hides.
TEST_F(GuardedTlsTest, TheLargestHolderIsHungUpOn) {
  Start(true);
  Client small(Connect(), {.trusted = &made_, .own = &made_});
  const int of_small = Admitted();
  Client large(Connect(), {.trusted = &made_, .own = &made_});
  const int of_large = Admitted();
  const auto begin_message = [](Client& client, int pieces) {
    client.Write(Bytes(kPrefaceBytes, 'P'));
    client.Write(Frame(1, 0, 1, Bytes(10)));
    client.Write(Frame(0, 0, 1, {0, 0x7f, 0, 0, 0}));
    for (int i = 0; i < pieces; ++i) client.Write(Frame(0, 0, 1, Bytes(16'000)));
  };
  begin_message(small, 1);
  ssize_t last = -1;
  std::thread reader([&] {
    Bytes bytes(1 << 16);
    while ((last = read(of_large, bytes.data(), bytes.size())) > 0) {
    }
  });
  begin_message(large, kMostHeldBytes / 16'000 + 100);
  reader.join();
  EXPECT_EQ(last, 0) << "it was not hung up on";
  const Bytes goaway = large.Read(100);
  if (!goaway.empty()) {  // else the socket's end was faster than its last bytes
    ASSERT_EQ(goaway.size(), 17);
    EXPECT_EQ(goaway[3], 7) << "no GOAWAY";
    EXPECT_EQ(goaway[16], 11) << "not ENHANCE_YOUR_CALM";
  }
  const size_t before = kPrefaceBytes + 19 + 14 + 16'009;
  EXPECT_EQ(Read(of_small, before).size(), before);
  small.Write({1, 2, 3});
  EXPECT_EQ(Read(of_small, 3), (Bytes{1, 2, 3}));
}

}  // namespace
}  // namespace meshfill
