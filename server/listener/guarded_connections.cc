#include "server/listener/guarded_connections.h"

#include <netdb.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/monotonic_time.h"
#include "server/listener/http2_guard.h"
#include "server/listener/stream_socket.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsInTurn = 8;  // of a connection, before the next one has its turn
// Steps of handshakes between two looks at the other connections: one may take a millisecond of RSA.
constexpr int kHandshakesInTurn = 4;
constexpr int kMostEvents = 64;
constexpr absl::Duration kLastWords = absl::Milliseconds(50);
// GOAWAY (RFC 9113 §6.8) of stream 0: no stream was taken, ENHANCE_YOUR_CALM.
constexpr std::array<uint8_t, 17> kGoAway = {0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11};

absl::Status NoDescriptor() {
  return absl::UnavailableError(
      absl::StrCat("no descriptor for a connection: ", std::strerror(errno), "; raise ulimit -n"));
}

// OpenSSL writes to sockets without MSG_NOSIGNAL.
void IgnoreClosedSockets() {
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
}

uint32_t EventOf(StreamSocket::State wanted) {
  return wanted == StreamSocket::State::kWantsRead ? EPOLLIN : EPOLLOUT;
}

std::string PeerOf(int socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  std::array<char, NI_MAXHOST> host{};
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
      getnameinfo(reinterpret_cast<const sockaddr*>(&peer), size, host.data(), host.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "a client";
  }
  return host.data();
}

}  // namespace

class GuardedConnections::Relay {
 public:
  Relay(std::string port, const ServerTransport& transport, const Limits& limits, Handler handler, int epoll,
        int wake)
      : port_(std::move(port)),
        transport_(transport),
        limits_(limits),
        epoll_(epoll),
        wake_(wake),
        handler_(std::move(handler)) {
    epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  }

  ~Relay() {
    while (!connections_.empty()) Close(*connections_.begin()->second);
    for (const int client : new_) close(client);
    close(epoll_);
    close(wake_);
  }

  void Add(int client) {
    const MutexLock lock(mu_);
    new_.push_back(client);
    Wake();
  }

  void StopAdmitting() {
    const MutexLock lock(mu_);
    handler_ = nullptr;
  }

  void Stop() {
    const MutexLock lock(mu_);
    stopping_ = true;
    Wake();
  }

  void Run() {
    IgnoreClosedSockets();
    absl::Time end = absl::InfiniteFuture();
    while (MonotonicNow() < end) {
      std::array<epoll_event, kMostEvents> events;
      const int count = epoll_wait(epoll_, events.data(), kMostEvents, WaitMilliseconds(end));
      int handshakes = 0;
      for (int i = 0; i < count; ++i) {
        // A connection that an earlier event has closed lives until the turn ends.
        const auto* const side = static_cast<const Side*>(events[i].data.ptr);
        if (side == nullptr) {
          if (TakeNew() && end == absl::InfiniteFuture()) end = MonotonicNow() + kLastWords;
        } else if (side->connection->closed) {
          continue;
        } else if (side->connection->server.socket != nullptr) {
          Serve(*side, events[i].events);
        } else if (++handshakes <= kHandshakesInTurn) {  // epoll tells of the others again
          Handshake(*side->connection);
        }
      }
      CloseOverdue();
      ResumePaused();
      CloseTheLargest();
      closed_.clear();
      // The server is gone by now: what it has not sent will not come.
      if (end != absl::InfiniteFuture() && connections_.empty()) return;
    }
  }

 private:
  struct Connection;

  // A socket of a connection.
  struct Side {
    Connection* connection = nullptr;
    std::unique_ptr<StreamSocket> socket;               // null: the server's, before the client is admitted
    bool ended = false;                                 // it has sent all that it will
    uint32_t watched = 0;                               // epoll's events
    uint32_t to_receive = EPOLLIN, to_send = EPOLLOUT;  // what it waits for; TLS may have it otherwise
    std::vector<uint8_t> queue;                         // bytes that it has yet to take
  };

  struct Connection {
    Connection(const Limits& limits, absl::Time now)
        : due(now + limits.handshake_time), guard(limits.most_streams, now) {}
    Side client, server;
    absl::Time due;    // of its handshake, and of its client's end once the server has ended
    std::string name;  // in transport_.peers; empty: no certificate
    Http2Guard guard;
    int64_t counted_bytes = 0;  // its part of held_bytes_
    bool closed = false;
  };

  void Wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof(one));
  }

  int WaitMilliseconds(absl::Time end) const {
    absl::Time until = end;
    for (const Connection* connection : paused_) until = std::min(until, connection->guard.ReadAgainAt());
    if (!dues_.empty()) until = std::min(until, dues_.begin()->first);
    if (until == absl::InfiniteFuture()) return -1;
    const int64_t milliseconds = absl::ToInt64Milliseconds(until - MonotonicNow()) + 1;
    return static_cast<int>(std::clamp<int64_t>(milliseconds, 0, 1000));
  }

  // Returns whether this is to stop.
  bool TakeNew() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_, &count, sizeof(count));
    std::vector<int> sockets;
    bool stopping = false;
    {
      const MutexLock lock(mu_);
      sockets.swap(new_);
      stopping = stopping_;
    }
    for (const int client : sockets) {
      auto owner = std::make_unique<Connection>(limits_, MonotonicNow());
      Connection& connection = *owner;
      connection.client.connection = connection.server.connection = &connection;
      const bool has_tls = transport_.tls != nullptr;
      TlsConnection tls = has_tls ? transport_.tls->Accept(client) : nullptr;
      const bool made = !has_tls || tls != nullptr;
      connection.client.socket = std::make_unique<StreamSocket>(client, std::move(tls));
      connections_.emplace(&connection, std::move(owner));
      dues_.emplace(connection.due, &connection);
      if (!made) {
        Close(connection);
      } else if (has_tls) {
        WatchFor(connection.client, EPOLLIN);
      } else {
        Admit(connection);
      }
    }
    return stopping;
  }

  // Takes the handshake as far as it goes. The server has the connection once it is done.
  void Handshake(Connection& connection) {
    Side& client = connection.client;
    switch (const StreamSocket::State state = client.socket->Handshake()) {
      case StreamSocket::State::kDone:
        return Admit(connection);
      case StreamSocket::State::kWantsRead:
      case StreamSocket::State::kWantsWrite:
        return WatchFor(client, EventOf(state));
      case StreamSocket::State::kEnded:
        return Close(connection);
      case StreamSocket::State::kFailed:
        return Refuse(connection, client.socket->error());
    }
  }

  void Admit(Connection& connection) {
    std::array<int, 2> pair{};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()) != 0) {
      return Refuse(connection, NoDescriptor().message());
    }
    connection.server.socket = std::make_unique<StreamSocket>(pair[0], nullptr);
    PeerNames::Names names;
    if (const SSL* const tls = connection.client.socket->tls()) names = ServerTls::NamesOfClient(*tls);
    const bool named = !names.empty();
    if (named) connection.name = transport_.peers->Add(pair[0], std::move(names));
    if (named && connection.name.empty()) {
      close(pair[1]);
      return Refuse(connection, "its certificate's names cannot be kept");
    }
    SetDue(connection, absl::InfiniteFuture());
    {
      const MutexLock lock(mu_);
      if (handler_ != nullptr) {
        handler_(pair[1]);
      } else {
        close(pair[1]);  // so that the connection ends
      }
    }
    Watch(connection);
  }

  void SetDue(Connection& connection, absl::Time due) {
    dues_.erase({connection.due, &connection});
    connection.due = due;
    if (due != absl::InfiniteFuture()) dues_.emplace(due, &connection);
  }

  void CloseOverdue() {
    while (!dues_.empty() && dues_.begin()->first <= MonotonicNow()) Close(*dues_.begin()->second);
  }

  void Serve(const Side& side, uint32_t events) {
    Connection& connection = *side.connection;
    if ((events & EPOLLERR) != 0) return Close(connection);
    Pass(connection, connection.client, connection.server);
    if (!connection.closed) Pass(connection, connection.server, connection.client);
    if (connection.closed) return;
    // Who has sent all had none of it in a queue by then.
    if (connection.client.ended && connection.server.ended) return Close(connection);
    // The client's socket has taken all by then. One that is silent would keep its place for ever.
    if (connection.server.ended && connection.due == absl::InfiniteFuture()) {
      SetDue(connection, MonotonicNow() + limits_.last_time);
    }
    Count(connection);
    Watch(connection);
  }

  bool MayRead(const Connection& connection, const Side& from) const {
    const Side& to = &from == &connection.client ? connection.server : connection.client;
    return !from.ended && to.queue.empty() && (&from == &connection.server || !paused_.contains(&connection));
  }

  // Passes bytes on until there are none, or `to` takes no more.
  void Pass(Connection& connection, Side& from, Side& to) {
    if (!to.queue.empty()) {
      const size_t sent = SendTo(connection, to, to.queue);
      if (connection.closed) return;
      to.queue.erase(to.queue.begin(), to.queue.begin() + static_cast<ptrdiff_t>(sent));
      if (to.queue.empty()) to.queue = {};  // gives its memory back
    }
    for (int i = 0; i < kReadsInTurn && MayRead(connection, from); ++i) {
      const StreamSocket::Moved got = from.socket->Receive(absl::MakeSpan(buffer_));
      switch (got.state) {
        case StreamSocket::State::kDone:
          break;
        case StreamSocket::State::kWantsRead:
        case StreamSocket::State::kWantsWrite:
          from.to_receive = EventOf(got.state);
          return;
        case StreamSocket::State::kEnded:
          from.ended = true;
          return to.socket->EndSending();
        case StreamSocket::State::kFailed:
          return Close(connection);
      }
      const absl::Span<const uint8_t> bytes(buffer_.data(), got.bytes);
      const absl::Time now = MonotonicNow();
      if (&from == &connection.server) {
        connection.guard.FromServer(bytes, now);
      } else if (const absl::Status status = connection.guard.FromClient(bytes, now); !status.ok()) {
        return HangUp(connection, status.message());
      }
      if (connection.guard.ReadAgainAt() > now) paused_.insert(&connection);
      const size_t sent = SendTo(connection, to, bytes);
      if (connection.closed) return;
      to.queue.assign(bytes.begin() + static_cast<ptrdiff_t>(sent), bytes.end());
    }
  }

  // How many bytes went. Closes the connection where none can go any more.
  size_t SendTo(Connection& connection, Side& to, absl::Span<const uint8_t> bytes) {
    const StreamSocket::Moved sent = to.socket->Send(bytes);
    if (sent.state == StreamSocket::State::kFailed || sent.state == StreamSocket::State::kEnded) {
      Close(connection);
    } else if (sent.state != StreamSocket::State::kDone) {
      to.to_send = EventOf(sent.state);
    }
    return sent.bytes;
  }

  void Count(Connection& connection) {
    const int64_t bytes =
        connection.guard.held_bytes() +
        static_cast<int64_t>(connection.client.queue.size() + connection.server.queue.size());
    held_bytes_ += bytes - connection.counted_bytes;
    connection.counted_bytes = bytes;
  }

  void CloseTheLargest() {
    while (held_bytes_ > limits_.most_held_bytes) {
      const auto largest = std::max_element(
          connections_.begin(), connections_.end(),
          [](const auto& a, const auto& b) { return a.second->counted_bytes < b.second->counted_bytes; });
      HangUp(*largest->second,
             absl::StrCat("incomplete messages of ", held_bytes_,
                          " bytes on all connections, of which this one holds the most, ",
                          largest->second->counted_bytes, " (at most ", limits_.most_held_bytes, ")"));
    }
  }

  void ResumePaused() {
    const absl::Time now = MonotonicNow();
    for (auto i = paused_.begin(); i != paused_.end();) {
      Connection& connection = **i;
      if (connection.guard.ReadAgainAt() > now) {
        ++i;
        continue;
      }
      i = paused_.erase(i);
      Watch(connection);
    }
  }

  // Asks epoll for what can be passed on.
  void Watch(Connection& connection) {
    for (Side* const side : {&connection.client, &connection.server}) {
      WatchFor(*side, (MayRead(connection, *side) ? side->to_receive : 0) |
                          (side->queue.empty() ? 0 : side->to_send));
    }
  }

  // A socket of which nothing is wanted is not watched at all: epoll would tell of its end again and again.
  void WatchFor(Side& side, uint32_t wanted) {
    if (wanted == side.watched) return;
    epoll_event event{.events = wanted, .data = {.ptr = &side}};
    const int change = wanted == 0 ? EPOLL_CTL_DEL : side.watched == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    epoll_ctl(epoll_, change, side.socket->fd(), &event);
    side.watched = wanted;
  }

  void HangUp(Connection& connection, absl::string_view reason) {
    LogLimited(
        "connections that are hung up on",
        absl::StrCat("hung up on ", PeerOf(connection.client.socket->fd()), " at ", port_, ": ", reason),
        {.level = LogLevel::kWarning});
    if (connection.client.queue.empty() && connection.guard.ServerIsBetweenFrames()) {
      connection.client.socket->Send(kGoAway);
    }
    Close(connection);
  }

  // Of a connection that the server has not had.
  void Refuse(Connection& connection, absl::string_view reason) {
    LogLimited("connections that are refused",
               absl::StrCat("refused a connection of ", PeerOf(connection.client.socket->fd()), " to ", port_,
                            ": ", reason),
               {.level = LogLevel::kWarning});
    Close(connection);
  }

  void Close(Connection& connection) {
    connection.closed = true;
    held_bytes_ -= connection.counted_bytes;
    paused_.erase(&connection);
    SetDue(connection, absl::InfiniteFuture());
    if (!connection.name.empty()) transport_.peers->Remove(connection.name);
    connection.client.socket.reset();
    connection.server.socket.reset();
    const auto found = connections_.find(&connection);
    closed_.push_back(std::move(found->second));
    connections_.erase(found);
  }

  const std::string port_;
  const ServerTransport transport_;
  const Limits limits_;
  const int epoll_;
  const int wake_;  // an eventfd
  std::unordered_map<const Connection*, std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Connection>> closed_;  // in this turn
  std::set<Connection*, std::less<>> paused_;
  std::set<std::pair<absl::Time, Connection*>> dues_;  // connections that are closed at a time
  int64_t held_bytes_ = 0;
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kReadBytes);
  Mutex mu_;
  Handler handler_ ABSL_GUARDED_BY(mu_);       // null: nobody is admitted any more
  std::vector<int> new_ ABSL_GUARDED_BY(mu_);  // sockets of clients
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

absl::StatusOr<std::unique_ptr<GuardedConnections>> GuardedConnections::Start(
    std::string port, const ServerTransport& transport, const Limits& limits, Handler handler) {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  if (epoll < 0) return NoDescriptor();
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) {
    const absl::Status status = NoDescriptor();
    close(epoll);
    return status;
  }
  return std::unique_ptr<GuardedConnections>(new GuardedConnections(
      std::make_unique<Relay>(std::move(port), transport, limits, std::move(handler), epoll, wake)));
}

GuardedConnections::GuardedConnections(std::unique_ptr<Relay> relay)
    : relay_(std::move(relay)), thread_([this] { relay_->Run(); }) {}

GuardedConnections::~GuardedConnections() {
  relay_->Stop();
  thread_.join();
}

void GuardedConnections::Add(int client) { relay_->Add(client); }

void GuardedConnections::StopAdmitting() { relay_->StopAdmitting(); }

}  // namespace meshfill
