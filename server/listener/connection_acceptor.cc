#include "server/listener/connection_acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

// Descriptors above all connections': for files, pages, and other ports.
constexpr uint64_t kReservedDescriptors = 128;
constexpr int kUserTimeoutMilliseconds = 20'000;  // for bytes that the peer does not acknowledge
constexpr int kCrowdedMilliseconds = 50;          // where no descriptor is free even to refuse
constexpr absl::Duration kForgetInterval = absl::Milliseconds(100);

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

absl::Status CannotListen(const HostPort& address, int error) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address.DebugString(), ": ",
                                             std::strerror(error),
                                             "; choose another port or stop who holds it"));
}

uint64_t DescriptorLimit() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

// The inode of a descriptor: another connection that has got the same number has another one.
ino_t InodeOf(int fd) {
  struct stat file {};
  return fstat(fd, &file) == 0 ? file.st_ino : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Bind(const HostPort& address,
                                                                             int max_connections) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  // Every interface: of IPv6 too, where the system has it.
  const bool any = address.host == "0.0.0.0";
  const std::string port = std::to_string(address.port);
  if (const int code = getaddrinfo(any ? "::" : address.host.c_str(), port.c_str(), &hints, &found);
      code != 0) {
    return absl::UnavailableError(
        absl::StrCat(address.DebugString(), ": ", gai_strerror(code), "; check the host"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  const auto bind_to = [](const sockaddr* name, socklen_t size) {
    const int fd = socket(name->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    const int on = 1, off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (name->sa_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (bind(fd, name, size) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  };
  int listener = bind_to(found->ai_addr, found->ai_addrlen);
  if (listener < 0 && any) {
    sockaddr_in every{};
    every.sin_family = AF_INET;
    every.sin_port = htons(address.port);
    listener = bind_to(reinterpret_cast<const sockaddr*>(&every), sizeof(every));
  }
  if (listener < 0) return CannotListen(address, errno);
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size);
  HostPort real = address;
  real.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                                : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  const int stop = eventfd(0, EFD_CLOEXEC);
  if (stop < 0) {
    const int error = errno;
    close(listener);
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.DebugString(), ": ",
                                               std::strerror(error), "; raise ulimit -n"));
  }
  return std::unique_ptr<ConnectionAcceptor>(
      new ConnectionAcceptor(std::move(real), listener, stop, max_connections));
}

ConnectionAcceptor::ConnectionAcceptor(HostPort address, int listener, int stop, int max_connections)
    : address_(std::move(address)),
      listener_(listener),
      max_connections_(max_connections),
      stop_(stop),
      spare_(OpenSpare()) {}

ConnectionAcceptor::~ConnectionAcceptor() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(stop_, &one, sizeof(one));
    thread_.join();
  }
  close(listener_);
  close(stop_);
  if (spare_ >= 0) close(spare_);
}

void ConnectionAcceptor::Start(Handler handler) {
  handler_ = std::move(handler);
  thread_ = std::thread([this] { Run(); });
}

void ConnectionAcceptor::Run() {
  while (true) {
    pollfd ready[] = {{.fd = listener_, .events = POLLIN, .revents = 0},
                      {.fd = stop_, .events = POLLIN, .revents = 0}};
    if (poll(ready, 2, -1) < 0) continue;  // a signal came
    if (ready[1].revents != 0) return;
    if (ready[0].revents != 0) AcceptOne();
  }
}

void ConnectionAcceptor::AcceptOne() {
  const int connection = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (connection >= 0) {
    if (!HasRoomFor(connection)) {
      close(connection);
      LogLimited("connections that are refused",
                 absl::StrCat("refused a connection to ", address_.DebugString(), ": ", open_.size(),
                              " are open (limits.max_connections is ", max_connections_, ", descriptors ",
                              DescriptorLimit(), ")"),
                 {.level = LogLevel::kWarning});
      return;
    }
    const int on = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMilliseconds,
               sizeof(kUserTimeoutMilliseconds));
    open_[connection] = InodeOf(connection);
    handler_(connection);
    return;
  }
  switch (errno) {
    case EMFILE:
    case ENFILE:
      MakeRoomAndRefuse();
      return;
    case EBADF:
    case EFAULT:
    case EINVAL:
    case ENOTSOCK:
    case EOPNOTSUPP:
      Log(absl::StrCat("no connection can be accepted at ", address_.DebugString(),
                       " any more: ", std::strerror(errno), "; the process ends, start it again"),
          {.level = LogLevel::kError});
      FlushLog();
      std::_Exit(EXIT_FAILURE);
    default:  // the error is of the one connection, or of the moment
      return;
  }
}

void ConnectionAcceptor::MakeRoomAndRefuse() {
  if (spare_ >= 0) close(spare_);
  const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (connection >= 0) close(connection);
  spare_ = OpenSpare();
  if (connection < 0) {  // others took what was given up: the listener stays readable, so wait a little
    pollfd stop{.fd = stop_, .events = POLLIN, .revents = 0};
    poll(&stop, 1, kCrowdedMilliseconds);
  }
  LogLimited("connections that are refused",
             absl::StrCat("refused a connection to ", address_.DebugString(), ": all ", DescriptorLimit(),
                          " descriptors of the process are in use; raise its limit (ulimit -n)"),
             {.level = LogLevel::kWarning});
}

bool ConnectionAcceptor::HasRoomFor(int connection) {
  // Numbers are given out from below: one so high says that hardly any is free.
  if (static_cast<uint64_t>(connection) + kReservedDescriptors >= DescriptorLimit()) return false;
  if (open_.size() >= static_cast<size_t>(max_connections_)) ForgetClosed();
  return open_.size() < static_cast<size_t>(max_connections_);
}

void ConnectionAcceptor::ForgetClosed() {
  const absl::Time now = MonotonicNow();
  if (now < forgot_at_ + kForgetInterval) return;
  forgot_at_ = now;
  std::erase_if(open_, [](const auto& entry) { return InodeOf(entry.first) != entry.second; });
}

}  // namespace meshfill
