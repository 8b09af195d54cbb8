// A man in the middle of one connection of gloo's: he hears it whole, and passes on what he likes, of TLS by
// records.
#ifndef MESHFILL_TESTS_ENGINE_COMM_GLOO_RECORD_RELAY_H_
#define MESHFILL_TESTS_ENGINE_COMM_GLOO_RECORD_RELAY_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/gloo/gloo_rendezvous.h"
#include "gtest/gtest.h"

namespace meshfill {

class RecordRelay {
 public:
  enum Direction { kToServer, kToClient };
  // What becomes of the `number`-th large record of a direction, which carries part of a payload: the records
  // that go on in its place. Null: all bytes are passed on as they are.
  using Tamper = std::function<std::vector<std::string>(Direction, int number, const std::string& record)>;
  static constexpr size_t kLargeRecordBytes = 4096;
  // Changes bytes of a direction, as they come; in clear text.
  using Rewrite = std::function<void(Direction, std::string& bytes)>;

  // In front of the endpoint with this address, which is changed to lead here.
  RecordRelay(std::string& address, Tamper tamper, Rewrite rewrite = nullptr)
      : tamper_(std::move(tamper)), rewrite_(std::move(rewrite)) {
    sockaddr_in here = {};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(here);
    listener_ = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&here), sizeof(here)), 0);
    EXPECT_EQ(listen(listener_.get(), 1), 0);
    EXPECT_EQ(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&here), &length), 0);
    constexpr size_t kSocketOffset = 40;
    std::memcpy(&target_, address.data() + kSocketOffset, sizeof(target_));
    std::memcpy(address.data() + kSocketOffset, &here, sizeof(here));
    thread_ = std::thread([this] { Run(); });
  }
  ~RecordRelay() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // Both directions, to their end.
  const std::string& Heard() {
    thread_.join();
    return heard_;
  }
  int tampered() const { return tampered_; }

 private:
  struct Flow {
    int from, to;
    Direction direction;
    size_t in_clear;      // hello or welcome, which goes before TLS
    std::string pending;  // less than a record
    int large_records = 0;
  };

  void Run() {
    pollfd waiting = {.fd = listener_.get(), .events = POLLIN, .revents = 0};
    while (poll(&waiting, 1, 10) == 0) {
      if (stop_) return;
    }
    const FileDescriptor client(accept(listener_.get(), nullptr, nullptr));
    const FileDescriptor server(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(server.get(), reinterpret_cast<const sockaddr*>(&target_), sizeof(target_)), 0);
    Flow flows[] = {{client.get(), server.get(), kToServer, 56, "", 0},
                    {server.get(), client.get(), kToClient, 24, "", 0}};
    while (!stop_) {
      pollfd polled[] = {{.fd = client.get(), .events = POLLIN, .revents = 0},
                         {.fd = server.get(), .events = POLLIN, .revents = 0}};
      if (poll(polled, 2, 10) <= 0) continue;
      for (int i : {0, 1}) {
        if (polled[i].revents != 0 && !Pass(flows[i])) return;
      }
    }
  }

  // False: one side has hung up.
  bool Pass(Flow& flow) {
    char bytes[65536];
    const ssize_t count = recv(flow.from, bytes, sizeof(bytes), 0);
    if (count <= 0) return false;
    heard_.append(bytes, count);
    if (rewrite_ != nullptr) {
      std::string rewritten(bytes, count);
      rewrite_(flow.direction, rewritten);
      return send(flow.to, rewritten.data(), rewritten.size(), MSG_NOSIGNAL) == std::ssize(rewritten);
    }
    if (tamper_ == nullptr) return send(flow.to, bytes, count, MSG_NOSIGNAL) == count;
    flow.pending.append(bytes, count);
    const size_t in_clear = std::min(flow.in_clear, flow.pending.size());
    std::string out = flow.pending.substr(0, in_clear);
    flow.pending.erase(0, in_clear);
    flow.in_clear -= in_clear;
    while (flow.pending.size() >= 5) {  // type, version, length
      const auto byte = [&](size_t i) { return static_cast<uint8_t>(flow.pending[i]); };
      const size_t size = 5 + byte(3) * 256 + byte(4);
      if (flow.pending.size() < size) break;
      const std::string record = flow.pending.substr(0, size);
      flow.pending.erase(0, size);
      if (size < kLargeRecordBytes) {
        out += record;
        continue;
      }
      const std::vector<std::string> instead = tamper_(flow.direction, flow.large_records++, record);
      tampered_ += instead != std::vector<std::string>{record};
      for (const std::string& other : instead) out += other;
    }
    return send(flow.to, out.data(), out.size(), MSG_NOSIGNAL) == std::ssize(out);
  }

  const Tamper tamper_;
  const Rewrite rewrite_;
  sockaddr_in target_;
  FileDescriptor listener_;
  std::atomic<bool> stop_ = false;
  std::string heard_;
  std::atomic<int> tampered_ = 0;
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_COMM_GLOO_RECORD_RELAY_H_
