// Stands between the sockets of a port's clients and gRPC: ends TLS, and connections that take too much.
//
// gRPC gets one end of a socket pair for each connection, once its handshake is done: a stranger's bytes
// never reach it. A thread passes the bytes on, both ways, and reads the frames (http2_guard.h). Where all
// connections together hold more than they may, the one that holds most is closed.
#ifndef MESHFILL_SERVER_LISTENER_GUARDED_CONNECTIONS_H_
#define MESHFILL_SERVER_LISTENER_GUARDED_CONNECTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/access/transport.h"

namespace meshfill {

class GuardedConnections {
 public:
  struct Limits {
    int most_streams = 0;         // of a connection
    int64_t most_held_bytes = 0;  // of all: incomplete messages, and what waits to be passed on
    absl::Duration handshake_time = absl::Seconds(10);  // of TLS
    absl::Duration last_time = absl::Seconds(10);       // for a client to end once the server has
  };

  // Takes over the server's end of a connection. Called from this class' thread.
  using Handler = std::function<void(int server)>;

  // `port`: its name in the log. UNAVAILABLE: no descriptor is free.
  static absl::StatusOr<std::unique_ptr<GuardedConnections>> Start(std::string port,
                                                                   const ServerTransport& transport,
                                                                   const Limits& limits, Handler handler);
  // Passes on what the server has sent before, and closes all. Takes 50 ms at most.
  ~GuardedConnections();
  GuardedConnections(const GuardedConnections&) = delete;
  GuardedConnections& operator=(const GuardedConnections&) = delete;

  // Takes over a client's socket, which does not block. Thread-safe.
  void Add(int client);
  // The handler is not called any more. Connections that it has had go on. Thread-safe.
  void StopAdmitting();

 private:
  class Relay;
  explicit GuardedConnections(std::unique_ptr<Relay> relay);

  const std::unique_ptr<Relay> relay_;
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_GUARDED_CONNECTIONS_H_
