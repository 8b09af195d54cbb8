// A server that vanishes while a call waits for it.
#include "server/cli/server_channel.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "tests/server/listener/http2_frame.h"

namespace meshfill {
namespace {

constexpr uint8_t kSettings = 4, kPing = 6, kAck = 1;

// Takes one connection and its calls, answers the first pings alone, and nothing after them.
class VanishingServer {
 public:
  explicit VanishingServer(int answered_pings) : answered_pings_(answered_pings) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    socklen_t size = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~VanishingServer() {
    if (thread_.joinable()) TakePings();
    close(listener_);
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  // Once its client has hung up.
  int TakePings() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    return pings_;
  }

 private:
  void Run() {
    const int client = accept(listener_, nullptr, nullptr);
    Send(client, Frame(kSettings, 0, 0, {}));
    Bytes preface(24), head(9);
    for (bool lives = Receive(client, preface); lives && Receive(client, head);) {
      Bytes payload(static_cast<size_t>(head[0] << 16 | head[1] << 8 | head[2]));
      lives = Receive(client, payload);
      const uint8_t type = head[3];
      if (head[4] == kAck) continue;
      if (type == kSettings) Send(client, Frame(kSettings, kAck, 0, {}));
      if (type == kPing && ++pings_ <= answered_pings_) Send(client, Frame(kPing, kAck, 0, payload));
    }
    close(client);
  }
  static bool Receive(int fd, Bytes& bytes) {
    return bytes.empty() ||
           recv(fd, bytes.data(), bytes.size(), MSG_WAITALL) == static_cast<ssize_t>(bytes.size());
  }
  static void Send(int fd, const Bytes& bytes) { send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  const int answered_pings_;
  const int listener_ = socket(AF_INET, SOCK_STREAM, 0);
  int port_ = 0;
  int pings_ = 0;
  std::thread thread_;
};

// gRPC would send two pings, and no more while nothing else is sent.
TEST(ServerChannelTest, AServerThatVanishesIsNoticedHoweverLongTheCallWaits) {
  constexpr int kAnswered = 4;
  VanishingServer server(kAnswered);
  {
    const auto channel = ServerChannel::Open({.address = server.address(),
                                              .ping_time = absl::Milliseconds(100),
                                              .ping_timeout = absl::Seconds(5)});
    ASSERT_TRUE(channel.ok()) << channel.status();
    const auto stub = v1::PrefillService::NewStub(channel->channel());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::PoolStatus pool;
    const grpc::Status status = stub->GetPool(&context, {}, &pool);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  }
  EXPECT_GT(server.TakePings(), 2);
}

TEST(ServerChannelTest, AServerIsPingedAfterAMinute) {
  const ServerOptions options;
  EXPECT_EQ(options.ping_time, absl::Minutes(1));
  EXPECT_EQ(options.ping_timeout, absl::Seconds(20));
}

}  // namespace
}  // namespace meshfill
