// What strangers may send to the port of a rank that waits for its peers, and what may stand in a peer's
// address.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/time/clock.h"
#include "engine/comm/gloo/gloo_rendezvous.h"
#include "kernels/monotonic_time.h"
#include "tests/fuzz/fuzz_target.h"

namespace meshfill {
namespace {

constexpr uint64_t kRun = 7;
constexpr absl::Duration kSoon = absl::Seconds(20);

std::unique_ptr<GlooRendezvous> Listen(int rank, bool encrypt = false) {
  auto rendezvous = GlooRendezvous::Listen(
      {.listen = "127.0.0.1", .rank = rank, .ranks = 2, .run = kRun, .encrypt = encrypt});
  FUZZ_CHECK(rendezvous.ok());
  return *std::move(rendezvous);
}

// The socket's address within an address of the data plane, as long as it is one of this machine.
sockaddr_in* SocketIn(std::string& address) {
  for (size_t at = 0; at + sizeof(sockaddr_in) <= address.size(); at += 8) {
    auto* socket = reinterpret_cast<sockaddr_in*>(&address[at]);
    if (socket->sin_family == AF_INET && socket->sin_addr.s_addr == htonl(INADDR_LOOPBACK)) return socket;
  }
  return nullptr;
}

// What rank 1 says to rank 0, as their addresses have it.
std::string Hello(const std::string& low, const std::string& high) {
  constexpr size_t kSecret = 24, kSecretBytes = 16;
  const uint32_t ranks[] = {1, 0};
  return low.substr(0, 16) + std::string(reinterpret_cast<const char*>(ranks), sizeof(ranks)) +
         high.substr(kSecret, kSecretBytes) + low.substr(kSecret, kSecretBytes);
}

// libFuzzer's alarm may interrupt it.
void Connect(int socket, const sockaddr_in& to) {
  while (connect(socket, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) {
    if (errno == EISCONN) return;
    FUZZ_CHECK(errno == EINTR || errno == EALREADY);
  }
}

// Two ranks meet beside a stranger who sends `said`; after the right hello, which he has heard, where the
// ranks encrypt.
void BesideAStranger(std::string said, bool encrypt) {
  const auto low = Listen(0, encrypt), high = Listen(1, encrypt);
  const std::vector<std::string> addresses = {low->address(), high->address()};
  std::string address = low->address();
  if (encrypt) said = Hello(low->address(), high->address()) + said;
  const FileDescriptor stranger(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in* const to = SocketIn(address);
  FUZZ_CHECK(to != nullptr);
  Connect(stranger.get(), *to);
  FUZZ_CHECK(send(stranger.get(), said.data(), said.size(), MSG_NOSIGNAL) == std::ssize(said));
  const absl::Time deadline = MonotonicNow() + kSoon;
  absl::StatusOr<std::vector<PeerSocket>> of_high;
  std::thread meet([&] { of_high = high->Connect(addresses, deadline); });
  auto of_low = low->Connect(addresses, deadline);
  meet.join();
  FUZZ_CHECK(of_low.ok() && of_high.ok() && low->strangers() == 1);
  // They are each other's.
  PeerSocket& to_high = (*of_low)[1];
  PeerSocket& to_low = (*of_high)[0];
  char byte = 'x';
  if (encrypt) {
    FUZZ_CHECK(to_high.tls->Write("y", 1).state == TlsChannel::State::kDone);
    while (to_low.tls->Read(&byte, 1).state != TlsChannel::State::kDone)
      FUZZ_CHECK(MonotonicNow() < deadline);
  } else {
    FUZZ_CHECK(send(to_high.socket.get(), "y", 1, MSG_NOSIGNAL) == 1);
    while (recv(to_low.socket.get(), &byte, 1, 0) != 1) FUZZ_CHECK(MonotonicNow() < deadline);
  }
  FUZZ_CHECK(byte == 'y');
}

// A rank is given `change`d bytes as its peer's address. Nobody leaves this machine: the socket's address
// stays, but for its port.
void WithAnAddress(FuzzInput& input) {
  const auto high = Listen(1);
  std::string peer = Listen(0)->address();  // and nobody listens there any more
  std::string bytes = peer;
  while (!input.empty()) {
    const size_t at = input.Word() % (bytes.size() + 1);
    const std::string piece = input.Piece();
    bytes.replace(at, piece.size(), piece);
  }
  if (bytes.size() == peer.size()) {
    const sockaddr_in* const socket = SocketIn(peer);
    std::memcpy(&bytes[reinterpret_cast<const char*>(socket) - peer.data()], socket, sizeof(*socket));
  }
  const std::vector<std::string> addresses = {bytes, high->address()};
  const auto sockets = high->Connect(addresses, MonotonicNow() + kSoon);
  FUZZ_CHECK(!sockets.ok());
  FUZZ_CHECK(sockets.status().message().find("rank 0") != absl::string_view::npos);
}

}  // namespace

const int kFuzzRounds = 2'000;

std::vector<std::string> FuzzSeeds() {
  const std::string address = Listen(0)->address();
  std::string hello = address;  // begins with the same magic and run
  hello.resize(56);
  return {"s" + hello,
          "s" + address,
          "s" + address + address,
          "sGET / HTTP/1.1\r\n\r\n",
          "tGET / HTTP/1.1\r\n\r\n",
          std::string("t\x16\x03\x01\0\x06\1\0\0\2\3\3", 12),  // the beginning of a ClientHello
          std::string("a\0\0", 3) + FuzzPiece(address),
          std::string("a\x10\0", 3) + FuzzPiece("\1"),
          std::string("a\x28\0", 3) + FuzzPiece(std::string(8, '\xff'))};
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace meshfill;
  FuzzInput input(data, size);
  switch (input.Byte()) {
    case 's':
      BesideAStranger(input.Rest(), /*encrypt=*/false);
      break;
    case 't':
      BesideAStranger(input.Rest(), /*encrypt=*/true);
      break;
    default:
      WithAnAddress(input);
  }
  return 0;
}
