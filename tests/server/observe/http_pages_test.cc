#include "server/observe/http_pages.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/observe/http_get.h"

namespace meshfill {
namespace {

std::vector<HttpPage> Pages(std::atomic<int>& asked) {
  return {{"/", "text/html; charset=utf-8", [] { return "<p>hello</p>"; }},
          {"/count", "text/plain", [&asked] { return std::to_string(++asked); }}};
}

TEST(HttpPagesTest, AnswersEachPageAnew) {
  std::atomic<int> asked = 0;
  const auto pages = HttpPages::Listen("127.0.0.1:0", Pages(asked));
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string root = HttpGet((*pages)->address(), "/");
  EXPECT_EQ(root.rfind("HTTP/1.1 200 OK\r\n", 0), 0u) << root;
  EXPECT_NE(root.find("\r\nContent-Type: text/html; charset=utf-8\r\n"), std::string::npos) << root;
  EXPECT_NE(root.find("default-src 'none'"), std::string::npos) << root;
  EXPECT_EQ(HttpBody(root), "<p>hello</p>");
  for (const char* count : {"1", "2", "3"}) {
    EXPECT_EQ(HttpBody(HttpGet((*pages)->address(), "/count?of=anything")), count);
  }
}

TEST(HttpPagesTest, RefusesWhatIsNoPage) {
  std::atomic<int> asked = 0;
  const auto pages = HttpPages::Listen("127.0.0.1:0", Pages(asked));
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string& address = (*pages)->address();
  for (const char* path : {"/other", "/count/", "/../etc/passwd", "/%2e%2e/etc/passwd"}) {
    EXPECT_EQ(HttpGet(address, path).find(" 200 "), std::string::npos) << path;
  }
  EXPECT_NE(HttpSend(address, "POST /count HTTP/1.0").find(" 405 "), std::string::npos);
  EXPECT_EQ(HttpBody(HttpSend(address, "HEAD / HTTP/1.0")), "");
  EXPECT_EQ(asked, 0);
  HttpSend(address, "nonsense");
  HttpGet(address, "/" + std::string(1 << 20, 'x'));
  EXPECT_EQ(HttpBody(HttpGet(address, "/count")), "1");
}

TEST(HttpPagesTest, ManyAtOnce) {
  std::atomic<int> asked = 0;
  const auto pages = HttpPages::Listen("127.0.0.1:0", Pages(asked));
  ASSERT_TRUE(pages.ok()) << pages.status();
  std::vector<std::thread> clients;
  for (int i = 0; i < 16; ++i) {
    clients.emplace_back(
        [&] { EXPECT_NE(HttpGet((*pages)->address(), "/count").find(" 200 "), std::string::npos); });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(asked, 16);
}

TEST(HttpPagesTest, PortInUseIsSaid) {
  std::atomic<int> asked = 0;
  const auto one = HttpPages::Listen("127.0.0.1:0", Pages(asked));
  ASSERT_TRUE(one.ok()) << one.status();
  const auto two = HttpPages::Listen((*one)->address(), Pages(asked));
  EXPECT_EQ(two.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(two.status().message()).find((*one)->address()), std::string::npos) << two.status();
}

}  // namespace
}  // namespace meshfill
