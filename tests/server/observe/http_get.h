// The plainest HTTP client, for what the server's pages answer.
#ifndef MESHFILL_TESTS_SERVER_OBSERVE_HTTP_GET_H_
#define MESHFILL_TESTS_SERVER_OBSERVE_HTTP_GET_H_

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/config/address.h"

namespace meshfill {

// The whole answer of the server at the numeric `address` to `head`, headers included.
inline std::string HttpSend(const std::string& address, const std::string& head) {
  const HostPort host_port = ParseHostPort(address).value();
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* peer = nullptr;
  if (getaddrinfo(host_port.host.c_str(), std::to_string(host_port.port).c_str(), &hints, &peer) != 0) {
    ADD_FAILURE() << address << " is not numeric";
    return "";
  }
  const int fd = socket(peer->ai_family, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, peer->ai_addr, peer->ai_addrlen), 0);
  freeaddrinfo(peer);
  const std::string request = head + "\r\nHost: test\r\n\r\n";
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t count; (count = read(fd, buffer, sizeof(buffer))) > 0;) answer.append(buffer, count);
  close(fd);
  return answer;
}

inline std::string HttpGet(const std::string& address, const std::string& path) {
  return HttpSend(address, absl::StrCat("GET ", path, " HTTP/1.0"));
}

// What follows the headers.
inline std::string HttpBody(const std::string& answer) {
  const size_t end = answer.find("\r\n\r\n");
  return end == std::string::npos ? "" : answer.substr(end + 4);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_OBSERVE_HTTP_GET_H_
