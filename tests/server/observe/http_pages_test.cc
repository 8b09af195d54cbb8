#include "server/observe/http_pages.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/config/address.h"
#include "tests/server/observe/gunzip.h"
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

TEST(HttpPagesTest, PacksLongPagesForThoseWhoTakeIt) {
  const std::string text = absl::StrCat(std::string(100'000, 'x'), "end");
  const auto pages = HttpPages::Listen("127.0.0.1:0", {{"/long", "text/plain", [&text] { return text; }},
                                                       {"/short", "text/plain", [] { return "short"; }}});
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string& address = (*pages)->address();
  const auto get = [&](const std::string& method, const std::string& path, const std::string& accepted) {
    return HttpSend(address, absl::StrCat(method, " ", path, " HTTP/1.0\r\nAccept-Encoding: ", accepted));
  };
  const std::string packed = get("GET", "/long", "deflate, gzip;q=0.8");
  EXPECT_NE(packed.find("\r\nContent-Encoding: gzip\r\n"), std::string::npos);
  EXPECT_NE(packed.find("\r\nVary: Accept, Accept-Encoding\r\n"), std::string::npos);
  EXPECT_LT(packed.size(), 2000u);
  EXPECT_EQ(Gunzip(HttpBody(packed)), text);
  EXPECT_EQ(HttpBody(get("HEAD", "/long", "gzip")), "");

  for (const std::string& plain :
       {get("GET", "/long", "gzip;q=0"), get("GET", "/long", "br"), HttpGet(address, "/long")}) {
    EXPECT_EQ(plain.find("Content-Encoding"), std::string::npos);
    EXPECT_NE(plain.find("\r\nVary: Accept, Accept-Encoding\r\n"), std::string::npos);
    EXPECT_EQ(HttpBody(plain), text);
  }
  EXPECT_EQ(HttpBody(get("GET", "/short", "gzip")), "short");
}

TEST(HttpPagesTest, MetricsAreInTheFormatThatTheClientPrefers) {
  const auto pages = HttpPages::Listen("127.0.0.1:0", {MetricsPage([](MetricsFormat format) {
                                         return format == MetricsFormat::kOpenMetrics ? "open" : "text";
                                       })});
  ASSERT_TRUE(pages.ok()) << pages.status();
  const auto get = [&](const std::string& accept) {
    return HttpSend((*pages)->address(), absl::StrCat("GET /metrics HTTP/1.0\r\nAccept: ", accept));
  };
  const std::string open = get("application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5");
  EXPECT_EQ(HttpBody(open), "open");
  EXPECT_NE(open.find("\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"),
            std::string::npos)
      << open;
  for (const std::string& text : {get("text/plain"), HttpGet((*pages)->address(), "/metrics")}) {
    EXPECT_EQ(HttpBody(text), "text");
    EXPECT_NE(text.find("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), std::string::npos);
    EXPECT_NE(text.find("\r\nVary: Accept, Accept-Encoding\r\n"), std::string::npos);
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
  EXPECT_NE(HttpSend(address, "POST /count HTTP/1.0\r\nContent-Length: 4\r\n\r\nbody").find(" 405 "),
            std::string::npos);
  const std::string head = HttpSend(address, "HEAD / HTTP/1.0");
  EXPECT_NE(head.find(" 200 "), std::string::npos) << head;
  EXPECT_EQ(HttpBody(head), "");
  EXPECT_EQ(asked, 0);
  HttpSend(address, "nonsense");
  HttpGet(address, "/" + std::string(1 << 20, 'x'));
  EXPECT_EQ(HttpBody(HttpGet(address, "/count")), "1");
}

// A page that says that something is wrong is still read: its body says what.
TEST(HttpPagesTest, AnUnhealthyPageIs503UntilItIsWell) {
  std::atomic<bool> healthy = false;
  const auto pages = HttpPages::Listen(
      "127.0.0.1:0",
      {{"/healthz", "text/plain", [&] { return healthy ? "lives\n" : "rank 3 stands still\n"; },
        [&] { return healthy.load(); }}});
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string sick = HttpGet((*pages)->address(), "/healthz");
  EXPECT_EQ(sick.rfind("HTTP/1.1 503 ", 0), 0u) << sick;
  EXPECT_EQ(HttpBody(sick), "rank 3 stands still\n");
  healthy = true;
  const std::string well = HttpGet((*pages)->address(), "/healthz");
  EXPECT_EQ(well.rfind("HTTP/1.1 200 ", 0), 0u) << well;
  for (const std::string& answer : {sick, well, HttpGet((*pages)->address(), "/nowhere")}) {
    for (const char* header : {"Cache-Control: no-store", "X-Content-Type-Options: nosniff",
                               "X-Frame-Options: DENY", "Connection: close"}) {
      EXPECT_NE(answer.find(absl::StrCat("\r\n", header, "\r\n")), std::string::npos) << header;
    }
  }
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

// Connections that never become a whole request.
class SlowClients {
 public:
  SlowClients(const std::string& address, int count, const std::string& begin) {
    const HostPort host_port = ParseHostPort(address).value();
    sockaddr_in peer{};
    peer.sin_family = AF_INET;
    peer.sin_port = htons(host_port.port);
    inet_pton(AF_INET, host_port.host.c_str(), &peer.sin_addr);
    for (int i = 0; i < count; ++i) {
      const int fd = socket(AF_INET, SOCK_STREAM, 0);
      EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
      fds_.push_back(fd);
      Send(begin);
    }
  }
  ~SlowClients() {
    for (const int fd : fds_) close(fd);
  }
  void Send(const std::string& text) {
    for (const int fd : fds_) send(fd, text.data(), text.size(), MSG_NOSIGNAL);
  }
  // All that the first one hears.
  std::string Read() {
    std::string answer;
    char buffer[4096];
    for (ssize_t count; (count = read(fds_.front(), buffer, sizeof(buffer))) > 0;)
      answer.append(buffer, count);
    return answer;
  }

 private:
  std::vector<int> fds_;
};

TEST(HttpPagesTest, SlowClientsHoldUpNobody) {
  std::atomic<int> asked = 0;
  const auto pages = HttpPages::Listen("127.0.0.1:0", Pages(asked));
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string& address = (*pages)->address();
  const SlowClients silent(address, 100, ""), half(address, 100, "GET /count HTTP/1.1\r\nHos");
  SlowClients dripping(address, 200,
                       "GET /count HTTP/1.1\r\nX: ");  // 400 in all: more than there is room for
  for (int i = 1; i <= 10; ++i) {
    dripping.Send("x");
    const absl::Time begin = MonotonicNow();
    EXPECT_EQ(HttpBody(HttpGet(address, "/count")), std::to_string(i));
    EXPECT_LT(MonotonicNow() - begin, absl::Seconds(5)) << "it waited for their ends, after 10 s";
  }
}

// Where there are too many, those who have had the longest time give way, and not who came last.
TEST(HttpPagesTest, InACrowdTheOldestGiveWay) {
  std::atomic<int> asked = 0;
  const auto pages = HttpPages::Listen("127.0.0.1:0", Pages(asked));
  ASSERT_TRUE(pages.ok()) << pages.status();
  const std::string& address = (*pages)->address();
  const SlowClients silent(address, 200, "");
  SlowClients late(address, 1, "GET /count HTTP/1.0\r\n");
  for (int i = 1; i <= 10; ++i) EXPECT_EQ(HttpBody(HttpGet(address, "/count")), std::to_string(i));
  late.Send("\r\n");
  EXPECT_EQ(HttpBody(late.Read()), "11");
}

TEST(HttpPagesTest, AreServedByIpv6) {
  if (!ResolveFreeAddress("[::1]:0").ok()) GTEST_SKIP() << "no IPv6 here";
  std::atomic<int> asked = 0;
  const auto pages = HttpPages::Listen("[::1]:0", Pages(asked));
  ASSERT_TRUE(pages.ok()) << pages.status();
  EXPECT_EQ((*pages)->address().rfind("[::1]:", 0), 0u) << (*pages)->address();
  EXPECT_EQ(HttpBody(HttpGet((*pages)->address(), "/count")), "1");
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
