#include "server/config/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {

bool HostPort::IsThisMachine() const {
  in_addr v4{};
  in6_addr v6{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

std::string HostPort::DebugString() const {
  const bool ipv6 = host.find(':') != std::string::npos;
  return ipv6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  const std::string address(text);
  const auto error = absl::InvalidArgumentError(
      absl::StrCat("\"", address, "\" is no HOST:PORT; write e.g. 127.0.0.1:50051"));
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return error;
  std::string host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    return error;
  }
  const std::string port_text = address.substr(colon + 1);
  uint32_t port = 0;
  if (host.empty() || port_text.find_first_not_of("0123456789") != std::string::npos ||
      !absl::SimpleAtoi(port_text, &port) || port > 65535) {
    return error;
  }
  return HostPort{host, static_cast<uint16_t>(port)};
}

absl::StatusOr<HostPort> ResolveFreeAddress(absl::string_view text) {
  ASSIGN_OR_RETURN(auto address, ParseHostPort(text));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (const int code = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found); code != 0) {
    return absl::UnavailableError(
        absl::StrCat(address.DebugString(), ": ", gai_strerror(code), "; check the host"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);

  char numeric[NI_MAXHOST];
  getnameinfo(found->ai_addr, found->ai_addrlen, numeric, sizeof(numeric), nullptr, 0, NI_NUMERICHOST);
  address.host = numeric;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int reuse = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  const bool bound = bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1) == 0;
  const int error = errno;
  close(fd);
  if (!bound) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.DebugString(), ": ",
                                               std::strerror(error),
                                               "; choose another port or stop who holds it"));
  }
  return address;
}

}  // namespace meshfill
