// Which addresses are of this machine alone: plain text is allowed there and nowhere else.
#include "server/config/address.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(AddressTest, LoopbackAloneIsThisMachine) {
  for (const char* host : {"127.0.0.1", "127.0.0.0", "127.255.255.255", "::1", "localhost"}) {
    EXPECT_TRUE((HostPort{host, 1}.IsThisMachine())) << host;
  }
  for (const char* host : {"0.0.0.0", "126.255.255.255", "128.0.0.1", "10.127.0.1", "1.0.0.127", "::", "::2",
                           "fe80::1", "", "localhost.example", "127.0.0.1.example"}) {
    EXPECT_FALSE((HostPort{host, 1}.IsThisMachine())) << host;
  }
}

TEST(AddressTest, IsReadAsItIsWritten) {
  for (const char* text : {"127.0.0.1:50051", "[::1]:50051", "[fe80::1]:0", "worker-3.pool:65535"}) {
    const auto address = ParseHostPort(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->DebugString(), text);
  }
  EXPECT_EQ(ParseHostPort("[::1]:7")->host, "::1");
  EXPECT_EQ(ParseHostPort("[::1]:7")->port, 7);
  for (const char* text : {"::1:7", "[]:7", "[::1]", "[::1]:", "[::1]:65536", "[::1:7", ":7", "host:+7"}) {
    EXPECT_EQ(ParseHostPort(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(AddressTest, APortThatIsTakenIsNamed) {
  const int holder = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in here = {};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(here);
  ASSERT_EQ(bind(holder, reinterpret_cast<sockaddr*>(&here), size), 0);
  ASSERT_EQ(listen(holder, 1), 0);
  ASSERT_EQ(getsockname(holder, reinterpret_cast<sockaddr*>(&here), &size), 0);
  const std::string taken = absl::StrCat("127.0.0.1:", ntohs(here.sin_port));
  const absl::Status refused = ResolveFreeAddress(taken).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(refused.message().find(taken), absl::string_view::npos) << refused;
  close(holder);
  for (int time = 0; time < 2; ++time) {  // whoever asks holds nothing himself
    const auto resolved = ResolveFreeAddress(taken);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(resolved->DebugString(), taken);
  }
}

// The system keeps the address of a connection that the server has ended for a minute.
TEST(AddressTest, AServerThatStartsAnewHasItsPort) {
  const int holder = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
  const int reuse = 1;
  setsockopt(holder, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_in here = {};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(here);
  ASSERT_EQ(bind(holder, reinterpret_cast<sockaddr*>(&here), size), 0);
  ASSERT_EQ(listen(holder, 1), 0);
  ASSERT_EQ(getsockname(holder, reinterpret_cast<sockaddr*>(&here), &size), 0);
  ASSERT_EQ(connect(client, reinterpret_cast<sockaddr*>(&here), size), 0);
  close(accept(holder, nullptr, nullptr));
  char byte = 0;
  EXPECT_EQ(read(client, &byte, 1), 0);
  close(client);
  close(holder);
  const auto resolved = ResolveFreeAddress(absl::StrCat("127.0.0.1:", ntohs(here.sin_port)));
  EXPECT_TRUE(resolved.ok()) << resolved.status();
}

TEST(AddressTest, ANameBecomesItsAddress) {
  const auto resolved = ResolveFreeAddress("localhost:0");
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_TRUE(resolved->host == "127.0.0.1" || resolved->host == "::1") << resolved->host;
}

}  // namespace
}  // namespace meshfill
