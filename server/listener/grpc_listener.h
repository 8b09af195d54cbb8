// A gRPC server on one port.
#ifndef MESHFILL_SERVER_LISTENER_GRPC_LISTENER_H_
#define MESHFILL_SERVER_LISTENER_GRPC_LISTENER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/access/transport.h"
#include "server/config/address.h"
#include "server/listener/connection_acceptor.h"
#include "server/listener/guarded_connections.h"

namespace meshfill {

struct GrpcListener {
  std::unique_ptr<GuardedConnections> guard;  // outlives the server, whose last words it passes on
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<ConnectionAcceptor> acceptor;  // null after Shutdown
  std::string address;                           // HOST:PORT, the real port

  // Closes the port. Calls that are live at the deadline are cancelled.
  void Shutdown(std::chrono::system_clock::time_point deadline);
};

struct PortLimits {
  int connections = 0;           // at a time
  int streams = 0;               // of a connection
  int64_t incomplete_bytes = 0;  // of messages that are not complete, on all connections
};

// Starts what was built, at `address`, whose port 0 stands for any that is free. UNAVAILABLE: another has the
// port.
absl::StatusOr<GrpcListener> ListenAt(const HostPort& address, const PortLimits& limits,
                                      const ServerTransport& transport, grpc::ServerBuilder& builder);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_GRPC_LISTENER_H_
