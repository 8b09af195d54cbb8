#include "server/listener/grpc_listener.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {

using Builder = grpc::ServerBuilder::experimental_type;

void GrpcListener::Shutdown(std::chrono::system_clock::time_point deadline) {
  acceptor.reset();  // first: gRPC takes no connection once it shuts down
  server->Shutdown(deadline);
}

absl::StatusOr<GrpcListener> ListenAt(const HostPort& address, const PortLimits& limits,
                                      const ServerTransport& transport, grpc::ServerBuilder& builder) {
  ASSIGN_OR_RETURN(auto acceptor, ConnectionAcceptor::Bind(address, limits.connections));
  std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> connections =
      builder.experimental().AddExternalConnectionAcceptor(Builder::ExternalConnectionType::FROM_FD,
                                                           transport.credentials);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    return absl::UnavailableError(absl::StrCat("gRPC cannot serve at ", address.DebugString(),
                                               "; start it again, with more memory or descriptors"));
  }
  std::unique_ptr<GuardedConnections> guard;
  if (transport.tls == nullptr) {
    ASSIGN_OR_RETURN(guard, GuardedConnections::Start(acceptor->address().DebugString(),
                                                      {.most_streams = limits.streams,
                                                       .most_held_bytes = limits.incomplete_bytes}));
  }
  acceptor->Start([connections, guard = guard.get()](int listener, int connection) {
    if (guard != nullptr) {
      const absl::StatusOr<int> guarded = guard->Add(connection);
      if (!guarded.ok()) return;  // as if it had not been accepted
      connection = *guarded;
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.listener_fd = listener;
    parameters.fd = connection;
    connections->HandleNewConnection(&parameters);
  });
  std::string real = acceptor->address().DebugString();
  return GrpcListener{transport, std::move(guard), std::move(server), std::move(acceptor), std::move(real)};
}

}  // namespace meshfill
