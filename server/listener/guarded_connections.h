// Stands between the sockets of a port's clients and gRPC, and ends connections that take too much.
//
// gRPC has one end of a socket pair for each connection. A thread passes the bytes on, both ways, and reads
// the frames (http2_guard.h). Where all connections together hold more than they may, the one that holds most
// is closed. For plain text: TLS hides the frames.
#ifndef MESHFILL_SERVER_LISTENER_GUARDED_CONNECTIONS_H_
#define MESHFILL_SERVER_LISTENER_GUARDED_CONNECTIONS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/mutex.h"

namespace meshfill {

class GuardedConnections {
 public:
  struct Limits {
    int most_streams = 0;         // of a connection
    int64_t most_held_bytes = 0;  // of all: incomplete messages, and what waits to be passed on
  };

  // `port`: its name in the log. UNAVAILABLE: no descriptor is free.
  static absl::StatusOr<std::unique_ptr<GuardedConnections>> Start(std::string port, const Limits& limits);
  // Passes on what the server has sent before, and closes all. Takes 50 ms at most.
  ~GuardedConnections();
  GuardedConnections(const GuardedConnections&) = delete;
  GuardedConnections& operator=(const GuardedConnections&) = delete;

  // Takes over a client's socket, which does not block. Returns the server's end of the connection.
  // UNAVAILABLE: no descriptor is free; the client's socket is closed. Thread-safe.
  absl::StatusOr<int> Add(int client);

 private:
  class Relay;
  explicit GuardedConnections(std::unique_ptr<Relay> relay);

  const std::unique_ptr<Relay> relay_;
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_GUARDED_CONNECTIONS_H_
