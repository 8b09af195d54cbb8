#include "server/listener/guarded_connections.h"

#include <netdb.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/monotonic_time.h"
#include "server/listener/http2_guard.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsInTurn = 8;  // of a connection, before the next one has its turn
constexpr int kMostEvents = 64;
constexpr absl::Duration kLastWords = absl::Milliseconds(50);
// GOAWAY (RFC 9113 §6.8) of stream 0: no stream was taken, ENHANCE_YOUR_CALM.
constexpr std::array<uint8_t, 17> kGoAway = {0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11};

absl::Status NoDescriptor() {
  return absl::UnavailableError(
      absl::StrCat("no descriptor for a connection: ", std::strerror(errno), "; raise ulimit -n"));
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
  Relay(std::string port, const Limits& limits, int epoll, int wake)
      : port_(std::move(port)), limits_(limits), epoll_(epoll), wake_(wake) {
    epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  }

  ~Relay() {
    while (!connections_.empty()) Close(*connections_.begin()->second);
    for (const auto& [client, server] : new_) {
      close(client);
      close(server);
    }
    close(epoll_);
    close(wake_);
  }

  void Add(int client, int server) {
    const MutexLock lock(mu_);
    new_.emplace_back(client, server);
    Wake();
  }

  void Stop() {
    const MutexLock lock(mu_);
    stopping_ = true;
    Wake();
  }

  void Run() {
    absl::Time end = absl::InfiniteFuture();
    while (MonotonicNow() < end) {
      std::array<epoll_event, kMostEvents> events;
      const int count = epoll_wait(epoll_, events.data(), kMostEvents, WaitMilliseconds(end));
      for (int i = 0; i < count; ++i) {
        // A connection that an earlier event has closed lives until the turn ends.
        const auto* const side = static_cast<const Side*>(events[i].data.ptr);
        if (side == nullptr) {
          if (TakeNew() && end == absl::InfiniteFuture()) end = MonotonicNow() + kLastWords;
        } else if (!side->connection->closed) {
          Serve(*side, events[i].events);
        }
      }
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
    int fd = -1;
    bool ended = false;          // it has sent all that it will
    uint32_t watched = 0;        // epoll's events
    std::vector<uint8_t> queue;  // bytes that it has yet to take
  };

  struct Connection {
    Connection(int most_streams, absl::Time now) : guard(most_streams, now) {}
    Side client, server;
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
    if (until == absl::InfiniteFuture()) return -1;
    const int64_t milliseconds = absl::ToInt64Milliseconds(until - MonotonicNow()) + 1;
    return static_cast<int>(std::clamp<int64_t>(milliseconds, 0, 1000));
  }

  // Returns whether this is to stop.
  bool TakeNew() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_, &count, sizeof(count));
    std::vector<std::pair<int, int>> sockets;
    bool stopping = false;
    {
      const MutexLock lock(mu_);
      sockets.swap(new_);
      stopping = stopping_;
    }
    for (const auto& [client, server] : sockets) {
      auto connection = std::make_unique<Connection>(limits_.most_streams, MonotonicNow());
      connection->client.connection = connection->server.connection = connection.get();
      connection->client.fd = client;
      connection->server.fd = server;
      Watch(*connection);
      connections_.emplace(connection.get(), std::move(connection));
    }
    return stopping;
  }

  void Serve(const Side& side, uint32_t events) {
    Connection& connection = *side.connection;
    if ((events & EPOLLERR) != 0) return Close(connection);
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLOUT)) != 0) {
      Pass(connection, connection.client, connection.server);
      if (!connection.closed) Pass(connection, connection.server, connection.client);
    }
    if (connection.closed) return;
    if (connection.client.ended && connection.server.ended && connection.client.queue.empty() &&
        connection.server.queue.empty()) {
      return Close(connection);
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
      const ssize_t sent = SendTo(connection, to, to.queue);
      if (sent < 0) return;
      to.queue.erase(to.queue.begin(), to.queue.begin() + sent);
      if (to.queue.empty()) to.queue = {};  // gives its memory back
      if (to.queue.empty() && from.ended) shutdown(to.fd, SHUT_WR);
    }
    for (int i = 0; i < kReadsInTurn && MayRead(connection, from); ++i) {
      const ssize_t got = recv(from.fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (got < 0) return Close(connection);
      if (got == 0) {
        from.ended = true;
        shutdown(to.fd, SHUT_WR);
        return;
      }
      const absl::Span<const uint8_t> bytes(buffer_.data(), static_cast<size_t>(got));
      const absl::Time now = MonotonicNow();
      if (&from == &connection.server) {
        connection.guard.FromServer(bytes, now);
      } else if (const absl::Status status = connection.guard.FromClient(bytes, now); !status.ok()) {
        return HangUp(connection, status.message());
      }
      if (connection.guard.ReadAgainAt() > now) paused_.insert(&connection);
      const ssize_t sent = SendTo(connection, to, bytes);
      if (sent < 0) return;
      to.queue.assign(bytes.begin() + sent, bytes.end());
    }
  }

  // How many bytes went; -1: the connection is closed.
  ssize_t SendTo(Connection& connection, const Side& to, absl::Span<const uint8_t> bytes) {
    const ssize_t sent = send(to.fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EAGAIN || errno == EINTR) return 0;
    Close(connection);
    return -1;
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

  // Asks epoll for what can be passed on. A socket of which nothing is wanted is not watched at all: epoll
  // would tell of its end again and again.
  void Watch(Connection& connection) {
    for (Side* const side : {&connection.client, &connection.server}) {
      const uint32_t wanted =
          (MayRead(connection, *side) ? EPOLLIN : 0) | (side->queue.empty() ? 0 : EPOLLOUT);
      if (wanted == side->watched) continue;
      epoll_event event{.events = wanted, .data = {.ptr = side}};
      const int change = wanted == 0 ? EPOLL_CTL_DEL : side->watched == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
      epoll_ctl(epoll_, change, side->fd, &event);
      side->watched = wanted;
    }
  }

  void HangUp(Connection& connection, absl::string_view reason) {
    LogLimited("connections that are hung up on",
               absl::StrCat("hung up on ", PeerOf(connection.client.fd), " at ", port_, ": ", reason),
               {.level = LogLevel::kWarning});
    if (connection.client.queue.empty() && connection.guard.ServerIsBetweenFrames()) {
      send(connection.client.fd, kGoAway.data(), kGoAway.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    Close(connection);
  }

  void Close(Connection& connection) {
    connection.closed = true;
    held_bytes_ -= connection.counted_bytes;
    paused_.erase(&connection);
    close(connection.client.fd);
    close(connection.server.fd);
    const auto found = connections_.find(&connection);
    closed_.push_back(std::move(found->second));
    connections_.erase(found);
  }

  const std::string port_;
  const Limits limits_;
  const int epoll_;
  const int wake_;  // an eventfd
  std::unordered_map<const Connection*, std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Connection>> closed_;  // in this turn
  std::set<Connection*, std::less<>> paused_;
  int64_t held_bytes_ = 0;
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kReadBytes);
  Mutex mu_;
  std::vector<std::pair<int, int>> new_ ABSL_GUARDED_BY(mu_);  // sockets of clients and server
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

absl::StatusOr<std::unique_ptr<GuardedConnections>> GuardedConnections::Start(std::string port,
                                                                              const Limits& limits) {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  if (epoll < 0) return NoDescriptor();
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) {
    const absl::Status status = NoDescriptor();
    close(epoll);
    return status;
  }
  return std::unique_ptr<GuardedConnections>(
      new GuardedConnections(std::make_unique<Relay>(std::move(port), limits, epoll, wake)));
}

GuardedConnections::GuardedConnections(std::unique_ptr<Relay> relay)
    : relay_(std::move(relay)), thread_([this] { relay_->Run(); }) {}

GuardedConnections::~GuardedConnections() {
  relay_->Stop();
  thread_.join();
}

absl::StatusOr<int> GuardedConnections::Add(int client) {
  std::array<int, 2> pair{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    const absl::Status status = NoDescriptor();
    close(client);
    return status;
  }
  relay_->Add(client, pair[0]);
  return pair[1];
}

}  // namespace meshfill
