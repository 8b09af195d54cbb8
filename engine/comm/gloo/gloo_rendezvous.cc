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

constexpr uint64_t kMagic = 0x316f6f6c67666d01;  // tells the versions of these structs apart
constexpr int kBacklog = 4096;                   // the system lowers it to its own limit
// A peer says its hello with its first packet. Who stays silent longer, or is one too many, is none.
constexpr absl::Duration kHelloTimeout = absl::Seconds(3);
constexpr size_t kStrangers = 512;

// Both ends run the same build, on machines of one byte order.
struct AddressBytes {
  uint64_t magic;
  uint64_t run;
  uint64_t rank;
  Secret secret;
  sockaddr_storage socket;
  uint64_t socket_length;
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

// Without an early end, which would tell how many bytes were right.
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
    Secret secret;
    const SocketAddress* interface;
    int listener;
    int interrupt;
  };

  explicit Meeting(const Self& self) : self_(self), peers_(self.ranks), sockets_(self.ranks) {}

  absl::StatusOr<std::vector<FileDescriptor>> Run(std::span<const std::string> addresses,
                                                  absl::Time deadline) {
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

  absl::Status ParseAddresses(std::span<const std::string> addresses) {
    if (std::ssize(addresses) != self_.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", self_.rank, ": ", addresses.size(),
                                                     " addresses for ", self_.ranks, " ranks"));
    }
    for (int rank = 0; rank < self_.ranks; ++rank) {
      const std::string& bytes = addresses[rank];
      AddressBytes& address = peers_[rank];
      const auto refuse = [&](absl::string_view why) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", self_.rank, ": the data address of rank ", rank, " ", why));
      };
      if (bytes.size() != sizeof(address)) return refuse("is none");
      std::memcpy(&address, bytes.data(), sizeof(address));
      if (address.magic != kMagic) return refuse("is none of this version's");
      if (address.run != self_.run) {
        return refuse(absl::StrCat("is of run ", address.run, ", this is run ", self_.run));
      }
      if (address.rank != static_cast<uint64_t>(rank))
        return refuse(absl::StrCat("is of rank ", address.rank));
      if (address.socket_length > sizeof(address.socket)) return refuse("is malformed");
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
    const absl::Time now = MonotonicNow();
    if (now >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", self_.rank, ": no connection with rank ",
                                                      absl::StrJoin(MissingPeers(), ", "),
                                                      " before the deadline"));
    }
    // At most a second, so that silent strangers are dropped.
    const absl::Duration wait = std::min(deadline - now, absl::Seconds(1));
    const int timeout = static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1;
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) {
      return absl::InternalError(absl::StrCat("rank ", self_.rank, ": poll: ", ErrnoText(errno)));
    }
    if (polled[0].revents != 0) {
      return absl::AbortedError(absl::StrCat("rank ", self_.rank, ": interrupted while connecting"));
    }
    size_t next = 2;
    for (auto out = outgoing_.begin(); out != outgoing_.end();) {
      const bool ready = polled[next++].revents != 0;
      ASSIGN_OR_RETURN(bool done, ready ? Advance(*out) : false);
      out = done ? outgoing_.erase(out) : std::next(out);
    }
    for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
      const bool ready = polled[next++].revents != 0;
      const bool done = ready ? Hear(*stranger) : now - stranger->since > kHelloTimeout;
      stranger = done ? strangers_.erase(stranger) : std::next(stranger);
    }
    if (polled[1].revents != 0) AcceptStrangers(now);
    return absl::OkStatus();
  }

  // Whether the socket has found its place in sockets_.
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
    sockets_[out.peer] = std::move(out.socket);
    return true;
  }

  // Whether there is nothing more to hear from the stranger: it is a peer, or none.
  bool Hear(Stranger& stranger) {
    const auto state = stranger.hello.Read(stranger.socket);
    if (state != PartRead<Hello>::State::kWhole) return state == PartRead<Hello>::State::kBroken;
    const Hello& hello = stranger.hello.value();
    const bool is_peer =
        hello.magic == kMagic && hello.run == self_.run && hello.to == static_cast<uint32_t>(self_.rank) &&
        Equal(hello.to_secret, self_.secret) && hello.from > static_cast<uint32_t>(self_.rank) &&
        hello.from < static_cast<uint32_t>(self_.ranks) &&
        Equal(hello.from_secret, peers_[hello.from].secret);
    if (!is_peer || sockets_[hello.from].valid()) return true;
    if (SendWhole(stranger.socket, Welcome{.magic = kMagic, .secret = hello.from_secret})) {
      sockets_[hello.from] = std::move(stranger.socket);
      ++met_;
    }
    return true;
  }

  void AcceptStrangers(absl::Time now) {
    for (size_t i = 0; i < kStrangers; ++i) {
      Stranger stranger = {
          .socket = FileDescriptor(accept4(self_.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)),
          .since = now,
          .hello = {}};
      if (!stranger.socket.valid()) {
        // Out of descriptors: make room, for a peer may be next.
        if ((errno == EMFILE || errno == ENFILE) && !strangers_.empty()) strangers_.pop_front();
        return;
      }
      ++accepted_;
      if (Hear(stranger)) continue;
      if (strangers_.size() == kStrangers) strangers_.pop_front();
      strangers_.push_back(std::move(stranger));
    }
  }

  std::vector<int> MissingPeers() const {
    std::vector<int> missing;
    for (int peer = 0; peer < self_.ranks; ++peer) {
      if (peer != self_.rank && !sockets_[peer].valid()) missing.push_back(peer);
    }
    return missing;
  }

  absl::Status Unavailable(int peer, absl::string_view why) const {
    return absl::UnavailableError(
        absl::StrCat("rank ", self_.rank, ": cannot connect to rank ", peer, ": ", why));
  }

  const Self self_;
  std::vector<AddressBytes> peers_;      // by rank
  std::vector<FileDescriptor> sockets_;  // by rank
  std::list<Outgoing> outgoing_;
  std::list<Stranger> strangers_;  // oldest first
  int accepted_ = 0;               // connections, of peers and others
  int met_ = 0;                    // of them, peers
};

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (valid()) close(fd_);
}

absl::StatusOr<std::unique_ptr<GlooRendezvous>> GlooRendezvous::Listen(const std::string& listen, int rank,
                                                                       int ranks, uint64_t run) {
  ASSIGN_OR_RETURN(SocketAddress interface, Resolve(listen));
  if (IsWildcard(interface)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data plane: \"", listen, "\" is every interface; name the one that carries the ranks' data"));
  }
  const auto unavailable = [&](absl::string_view what) {
    return absl::UnavailableError(
        absl::StrCat("data plane: cannot ", what, " ", listen, ": ", ErrnoText(errno)));
  };
  std::unique_ptr<GlooRendezvous> rendezvous(new GlooRendezvous(rank, ranks, run));
  rendezvous->interface_ = interface;
  rendezvous->listener_ =
      FileDescriptor(socket(interface.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  rendezvous->interrupt_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  const int listener = rendezvous->listener_.get();
  AddressBytes address = {.magic = kMagic, .run = run, .rank = static_cast<uint64_t>(rank)};
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
  address.socket_length = length;
  rendezvous->secret_ = address.secret;
  rendezvous->address_.assign(reinterpret_cast<const char*>(&address), sizeof(address));
  return rendezvous;
}

absl::StatusOr<std::vector<FileDescriptor>> GlooRendezvous::Connect(std::span<const std::string> addresses,
                                                                    absl::Time deadline) {
  Meeting meeting({.rank = rank_,
                   .ranks = ranks_,
                   .run = run_,
                   .secret = secret_,
                   .interface = &interface_,
                   .listener = listener_.get(),
                   .interrupt = interrupt_.get()});
  absl::StatusOr<std::vector<FileDescriptor>> sockets = meeting.Run(addresses, deadline);
  listener_ = FileDescriptor();
  strangers_ = meeting.dropped();
  return sockets;
}

void GlooRendezvous::Interrupt() {
  // Fails only where the counter is full, which is readable too.
  [[maybe_unused]] const int result = eventfd_write(interrupt_.get(), 1);
}

}  // namespace meshfill
