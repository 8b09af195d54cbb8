#include "engine/comm/gloo/gloo_rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <system_error>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/comm/interface_address.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using Secret = GlooRendezvous::Secret;
using Key = TlsChannel::Key;

constexpr uint64_t kMagic = 0x316f6f6c67666d02;  // tells the versions of these structs apart
constexpr int kBacklog = 4096;                   // the system lowers it to its own limit
constexpr size_t kStrangers = 512;               // of those that say nothing the oldest is dropped

// Both ends run the same build, on machines of one byte order.
struct AddressBytes {
  uint64_t magic;
  uint64_t run;
  uint64_t rank;
  Secret secret;
  sockaddr_storage socket;
  uint64_t socket_length;
  uint64_t encrypt;
  Key key;
};
struct Hello {
  uint64_t magic;
  uint64_t run;
  uint32_t from;
  uint32_t to;
  Secret from_secret;
  Secret to_secret;
};
struct Welcome {
  uint64_t magic;
  Secret secret;
};
static_assert(std::is_trivially_copyable_v<AddressBytes> && std::has_unique_object_representations_v<Hello> &&
              std::has_unique_object_representations_v<Welcome>);

std::string ErrnoText(int error) { return std::generic_category().message(error); }

// The key of one connection, of both endpoints' keys.
absl::StatusOr<Key> ConnectionKey(const AddressBytes& server, const AddressBytes& client) {
  std::array<uint8_t, 2 * sizeof(Key)> secret;
  std::copy(server.key.begin(), server.key.end(), secret.begin());
  std::copy(client.key.begin(), client.key.end(), secret.begin() + sizeof(Key));
  return TlsChannel::DeriveKey(secret, absl::StrCat(server.run, ",", server.rank, ",", client.rank));
}

// Compares all bytes: an early end would tell how many of them were right.
bool Equal(const Secret& a, const Secret& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

bool IsWildcard(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr);
}

absl::StatusOr<SocketAddress> Resolve(const std::string& listen) {
  const std::string host = InterfaceAddress(listen).value_or(listen);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &list); error != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data plane: \"", listen,
        "\" is no network interface, address or host name of this machine: ", gai_strerror(error)));
  }
  SocketAddress address;
  address.length = list->ai_addrlen;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  freeaddrinfo(list);
  return address;
}

// Sends or receives on a new socket never block here: these structs are smaller than any socket buffer.
template <typename T>
bool SendWhole(const FileDescriptor& socket, const T& value) {
  return send(socket.get(), &value, sizeof(value), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(value));
}

// Reads a T in as many pieces as it comes in.
template <typename T>
class PartRead {
 public:
  enum class State { kMore, kWhole, kBroken };

  State Read(const FileDescriptor& socket) {
    const ssize_t count =
        recv(socket.get(), reinterpret_cast<char*>(&value_) + bytes_, sizeof(value_) - bytes_, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return State::kMore;
    if (count <= 0) return State::kBroken;
    bytes_ += static_cast<size_t>(count);
    return bytes_ == sizeof(value_) ? State::kWhole : State::kMore;
  }
  const T& value() const { return value_; }

 private:
  T value_ = {};
  size_t bytes_ = 0;
};

// One call of Connect.
class Meeting {
 public:
  struct Self {
    int rank;
    int ranks;
    uint64_t run;
    bool encrypt;
    absl::Duration hello_timeout;
    Secret secret;
    const SocketAddress* interface;
    int listener;
    int interrupt;
  };

  explicit Meeting(const Self& self) : self_(self), peers_(self.ranks), sockets_(self.ranks) {}

  absl::StatusOr<std::vector<PeerSocket>> Run(std::span<const std::string> addresses, absl::Time deadline) {
    RETURN_IF_ERROR(ParseAddresses(addresses));
    for (int peer = 0; peer < self_.rank; ++peer) {
      RETURN_IF_ERROR(StartConnecting(peer));
    }
    while (!MissingPeers().empty()) {
      RETURN_IF_ERROR(Poll(deadline));
    }
    return std::move(sockets_);
  }

  int dropped() const { return accepted_ - met_; }

 private:
  struct Outgoing {
    int peer;
    FileDescriptor socket;
    bool said_hello = false;
    PartRead<Welcome> welcome;
  };
  struct Stranger {
    FileDescriptor socket;
    absl::Time since;
    PartRead<Hello> hello;
  };
  // A connection after hello and welcome, while TLS shakes hands.
  struct Securing {
    int peer;
    TlsChannel::Side side;  // this rank's side
    absl::Time since;
    PeerSocket connection;
    TlsChannel::State state = TlsChannel::State::kWantsRead;
  };

  absl::Status ParseAddresses(std::span<const std::string> addresses) {
    if (std::ssize(addresses) != self_.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", self_.rank, ": ", addresses.size(),
                                                     " addresses for ", self_.ranks, " ranks"));
    }
    for (int rank = 0; rank < self_.ranks; ++rank) {
      if (const absl::Status good = CheckGlooAddress(addresses[rank], self_.run, rank, self_.encrypt);
          !good.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", self_.rank, ": the data address of rank ", rank, " ", good.message()));
      }
      std::memcpy(&peers_[rank], addresses[rank].data(), sizeof(AddressBytes));
    }
    return absl::OkStatus();
  }

  absl::Status StartConnecting(int peer) {
    const AddressBytes& address = peers_[peer];
    FileDescriptor socket(::socket(address.socket.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket.valid()) return Unavailable(peer, ErrnoText(errno));
    if (bind(socket.get(), self_.interface->get(), self_.interface->length) != 0) {
      return Unavailable(peer, absl::StrCat("binding to the interface: ", ErrnoText(errno)));
    }
    if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.socket),
                static_cast<socklen_t>(address.socket_length)) != 0 &&
        errno != EINPROGRESS) {
      return Unavailable(peer, ErrnoText(errno));
    }
    outgoing_.push_back({.peer = peer, .socket = std::move(socket), .said_hello = false, .welcome = {}});
    return absl::OkStatus();
  }

  // Waits for the next event, and handles all that there are.
  absl::Status Poll(absl::Time deadline) {
    std::vector<pollfd> polled = {{.fd = self_.interrupt, .events = POLLIN, .revents = 0},
                                  {.fd = self_.listener, .events = POLLIN, .revents = 0}};
    for (const Outgoing& out : outgoing_) {
      polled.push_back({.fd = out.socket.get(),
                        .events = static_cast<short>(out.said_hello ? POLLIN : POLLOUT),
                        .revents = 0});
    }
    for (const Stranger& stranger : strangers_) {
      polled.push_back({.fd = stranger.socket.get(), .events = POLLIN, .revents = 0});
    }
    for (const Securing& securing : securing_) {
      const bool writes = securing.state == TlsChannel::State::kWantsWrite;
      polled.push_back({.fd = securing.connection.socket.get(),
                        .events = static_cast<short>(writes ? POLLOUT : POLLIN),
                        .revents = 0});
    }
    const absl::Time now = MonotonicNow();
    if (now >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", self_.rank, ": no connection with rank ",
                                                      absl::StrJoin(MissingPeers(), ", "),
                                                      " before the deadline"));
    }
    // At most a second, so that silent strangers are dropped.
    const absl::Duration wait = std::min({deadline - now, self_.hello_timeout, absl::Seconds(1)});
    const int timeout = static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1;
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) {
      return absl::InternalError(absl::StrCat("rank ", self_.rank, ": poll: ", ErrnoText(errno)));
    }
    if (polled[0].revents != 0) {
      return absl::AbortedError(absl::StrCat("rank ", self_.rank, ": interrupted while connecting"));
    }
    // Handshakes under way come first: the other connections, which are before them in `polled`, add to them.
    size_t next = 2 + outgoing_.size() + strangers_.size();
    for (auto securing = securing_.begin(); securing != securing_.end();) {
      const bool ready = polled[next++].revents != 0;
      ASSIGN_OR_RETURN(bool done, Secure(*securing, ready, now));
      securing = done ? securing_.erase(securing) : std::next(securing);
    }
    next = 2;
    for (auto out = outgoing_.begin(); out != outgoing_.end();) {
      const bool ready = polled[next++].revents != 0;
      ASSIGN_OR_RETURN(bool done, ready ? Advance(*out) : false);
      out = done ? outgoing_.erase(out) : std::next(out);
    }
    for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
      const bool ready = polled[next++].revents != 0;
      ASSIGN_OR_RETURN(bool done, ready ? Hear(*stranger) : now - stranger->since > self_.hello_timeout);
      stranger = done ? strangers_.erase(stranger) : std::next(stranger);
    }
    return polled[1].revents != 0 ? AcceptStrangers(now) : absl::OkStatus();
  }

  // Whether the socket has left this list for another.
  absl::StatusOr<bool> Advance(Outgoing& out) {
    if (!out.said_hello) {
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(out.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return Unavailable(out.peer, ErrnoText(error));
      const Hello hello = {.magic = kMagic,
                           .run = self_.run,
                           .from = static_cast<uint32_t>(self_.rank),
                           .to = static_cast<uint32_t>(out.peer),
                           .from_secret = self_.secret,
                           .to_secret = peers_[out.peer].secret};
      if (!SendWhole(out.socket, hello)) return Unavailable(out.peer, ErrnoText(errno));
      out.said_hello = true;
      return false;
    }
    switch (out.welcome.Read(out.socket)) {
      case PartRead<Welcome>::State::kMore:
        return false;
      case PartRead<Welcome>::State::kBroken:
        return Unavailable(out.peer, "it hung up, being of another run or at its end");
      case PartRead<Welcome>::State::kWhole:
        break;
    }
    const Welcome& welcome = out.welcome.value();
    if (welcome.magic != kMagic || !Equal(welcome.secret, self_.secret)) {
      return Unavailable(out.peer, "something else answers at its address");
    }
    RETURN_IF_ERROR(Meet(out.peer, TlsChannel::Side::kClient, std::move(out.socket)));
    return true;
  }

  // The peer and this rank have shown each other their secrets.
  absl::Status Meet(int peer, TlsChannel::Side side, FileDescriptor socket) {
    PeerSocket connection = {.socket = std::move(socket), .tls = nullptr};
    if (!self_.encrypt) {
      Take(peer, side, std::move(connection));
      return absl::OkStatus();
    }
    const bool serves = side == TlsChannel::Side::kServer;
    ASSIGN_OR_RETURN(const Key key,
                     ConnectionKey(peers_[serves ? self_.rank : peer], peers_[serves ? peer : self_.rank]));
    ASSIGN_OR_RETURN(connection.tls, TlsChannel::Make(side, connection.socket.get(), key));
    securing_.push_back(
        {.peer = peer, .side = side, .since = MonotonicNow(), .connection = std::move(connection)});
    ASSIGN_OR_RETURN(bool done, Secure(securing_.back(), /*ready=*/true, securing_.back().since));
    if (done) securing_.pop_back();
    return absl::OkStatus();
  }

  void Take(int peer, TlsChannel::Side side, PeerSocket connection) {
    sockets_[peer] = std::move(connection);
    if (side == TlsChannel::Side::kServer) ++met_;
  }

  // Whether the handshake is over, one way or the other. A peer that this rank has called must be who it
  // says.
  absl::StatusOr<bool> Secure(Securing& securing, bool ready, absl::Time now) {
    const bool called = securing.side == TlsChannel::Side::kClient;
    if (!ready) return !called && now - securing.since > self_.hello_timeout;
    TlsChannel& tls = *securing.connection.tls;
    securing.state = tls.Handshake();
    switch (securing.state) {
      case TlsChannel::State::kDone:
        if (!sockets_[securing.peer].socket.valid()) {
          Take(securing.peer, securing.side, std::move(securing.connection));
        }
        return true;
      case TlsChannel::State::kWantsRead:
      case TlsChannel::State::kWantsWrite:
        return false;
      case TlsChannel::State::kEnded:
        if (called) return Unavailable(securing.peer, "it hung up in the TLS handshake");
        return true;
      case TlsChannel::State::kFailed:
        if (called)
          return Unavailable(securing.peer, absl::StrCat("it has not this run's key: ", tls.error()));
        return true;
    }
    return true;
  }

  // Whether there is nothing more to hear from the stranger: it is a peer, or none.
  absl::StatusOr<bool> Hear(Stranger& stranger) {
    const auto state = stranger.hello.Read(stranger.socket);
    if (state != PartRead<Hello>::State::kWhole) return state == PartRead<Hello>::State::kBroken;
    const Hello& hello = stranger.hello.value();
    const bool is_peer =
        hello.magic == kMagic && hello.run == self_.run && hello.to == static_cast<uint32_t>(self_.rank) &&
        Equal(hello.to_secret, self_.secret) && hello.from > static_cast<uint32_t>(self_.rank) &&
        hello.from < static_cast<uint32_t>(self_.ranks) &&
        Equal(hello.from_secret, peers_[hello.from].secret);
    if (!is_peer || sockets_[hello.from].socket.valid()) return true;
    if (SendWhole(stranger.socket, Welcome{.magic = kMagic, .secret = hello.from_secret})) {
      RETURN_IF_ERROR(
          Meet(static_cast<int>(hello.from), TlsChannel::Side::kServer, std::move(stranger.socket)));
    }
    return true;
  }

  absl::Status AcceptStrangers(absl::Time now) {
    for (size_t i = 0; i < kStrangers; ++i) {
      Stranger stranger = {
          .socket = FileDescriptor(accept4(self_.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)),
          .since = now,
          .hello = {}};
      if (!stranger.socket.valid()) {
        // Out of descriptors: make room, for a peer may be next. The system says so even where nobody waits
        // any more; for the first, somebody does.
        if (i == 0 && (errno == EMFILE || errno == ENFILE) && !strangers_.empty()) strangers_.pop_front();
        break;
      }
      ++accepted_;
      ASSIGN_OR_RETURN(bool done, Hear(stranger));
      if (done) continue;
      if (strangers_.size() == kStrangers) strangers_.pop_front();
      strangers_.push_back(std::move(stranger));
    }
    return absl::OkStatus();
  }

  std::vector<int> MissingPeers() const {
    std::vector<int> missing;
    for (int peer = 0; peer < self_.ranks; ++peer) {
      if (peer != self_.rank && !sockets_[peer].socket.valid()) missing.push_back(peer);
    }
    return missing;
  }

  absl::Status Unavailable(int peer, absl::string_view why) const {
    return absl::UnavailableError(
        absl::StrCat("rank ", self_.rank, ": cannot connect to rank ", peer, ": ", why));
  }

  const Self self_;
  std::vector<AddressBytes> peers_;  // by rank
  std::vector<PeerSocket> sockets_;  // by rank
  std::list<Outgoing> outgoing_;
  std::list<Stranger> strangers_;  // oldest first
  std::list<Securing> securing_;   // several may claim to be the same peer; one can show it
  int accepted_ = 0;               // connections, of peers and others
  int met_ = 0;                    // accepted connections that are peers
};

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (valid()) close(fd_);
}

absl::Status CheckGlooAddress(absl::string_view address, uint64_t run, int rank, bool encrypt) {
  const auto refuse = [](const std::string& why) { return absl::InvalidArgumentError(why); };
  AddressBytes bytes;
  if (address.size() != sizeof(bytes)) return refuse("is none");
  std::memcpy(&bytes, address.data(), sizeof(bytes));
  if (bytes.magic != kMagic) return refuse("is none of this version's");
  if (bytes.run != run) return refuse(absl::StrCat("is of run ", bytes.run, ", this is run ", run));
  if (bytes.rank != static_cast<uint64_t>(rank)) return refuse(absl::StrCat("is of rank ", bytes.rank));
  if (bytes.socket_length > sizeof(bytes.socket)) return refuse("is malformed");
  if ((bytes.encrypt != 0) != encrypt) {
    return refuse(absl::StrCat("is of a rank that ", encrypt ? "does not encrypt" : "encrypts",
                               ", unlike this one; give all the same pool.encrypt"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GlooRendezvous>> GlooRendezvous::Listen(const Options& options) {
  const std::string& listen = options.listen;
  ASSIGN_OR_RETURN(SocketAddress interface, Resolve(listen));
  if (IsWildcard(interface)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data plane: \"", listen, "\" is every interface; name the one that carries the ranks' data"));
  }
  const auto unavailable = [&](absl::string_view what) {
    return absl::UnavailableError(
        absl::StrCat("data plane: cannot ", what, " ", listen, ": ", ErrnoText(errno)));
  };
  std::unique_ptr<GlooRendezvous> rendezvous(new GlooRendezvous(options));
  rendezvous->interface_ = interface;
  rendezvous->listener_ =
      FileDescriptor(socket(interface.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  rendezvous->interrupt_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  const int listener = rendezvous->listener_.get();
  AddressBytes address = {.magic = kMagic,
                          .run = options.run,
                          .rank = static_cast<uint64_t>(options.rank),
                          .encrypt = options.encrypt};
  socklen_t length = sizeof(address.socket);
  if (listener < 0 || !rendezvous->interrupt_.valid()) return unavailable("make a socket for");
  if (bind(listener, interface.get(), interface.length) != 0) return unavailable("bind to");
  if (::listen(listener, kBacklog) != 0) return unavailable("listen on");
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address.socket), &length) != 0) {
    return unavailable("name the port on");
  }
  if (getrandom(address.secret.data(), address.secret.size(), 0) != std::ssize(address.secret)) {
    return unavailable("draw a secret for");
  }
  if (options.encrypt && getrandom(address.key.data(), address.key.size(), 0) != std::ssize(address.key)) {
    return unavailable("draw a key for");
  }
  address.socket_length = length;
  rendezvous->secret_ = address.secret;
  rendezvous->address_.assign(reinterpret_cast<const char*>(&address), sizeof(address));
  return rendezvous;
}

absl::StatusOr<std::vector<PeerSocket>> GlooRendezvous::Connect(std::span<const std::string> addresses,
                                                                absl::Time deadline) {
  Meeting meeting({.rank = options_.rank,
                   .ranks = options_.ranks,
                   .run = options_.run,
                   .encrypt = options_.encrypt,
                   .hello_timeout = options_.hello_timeout,
                   .secret = secret_,
                   .interface = &interface_,
                   .listener = listener_.get(),
                   .interrupt = interrupt_.get()});
  absl::StatusOr<std::vector<PeerSocket>> sockets = meeting.Run(addresses, deadline);
  listener_ = FileDescriptor();
  strangers_ = meeting.dropped();
  return sockets;
}

void GlooRendezvous::Interrupt() {
  // Fails only where the counter is full, which is readable too.
  [[maybe_unused]] const int result = eventfd_write(interrupt_.get(), 1);
}

}  // namespace meshfill
