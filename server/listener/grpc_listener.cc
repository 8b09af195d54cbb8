#include "server/listener/grpc_listener.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {

using Builder = grpc::ServerBuilder::experimental_type;

void GrpcListener::Shutdown(std::chrono::system_clock::time_point deadline) {
  guard->StopAdmitting();  // first: gRPC takes no connection once it shuts down
  acceptor.reset();
  server->Shutdown(deadline);
}

absl::StatusOr<GrpcListener> ListenAt(const HostPort& address, const PortLimits& limits,
                                      const ServerTransport& transport, grpc::ServerBuilder& builder) {
  ASSIGN_OR_RETURN(auto acceptor, ConnectionAcceptor::Bind(address, limits.connections));
  std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> connections =
      builder.experimental().AddExternalConnectionAcceptor(Builder::ExternalConnectionType::FROM_FD,
                                                           grpc::InsecureServerCredentials());
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    return absl::UnavailableError(absl::StrCat("gRPC cannot serve at ", address.DebugString(),
                                               "; start it again, with more memory or descriptors"));
  }
  const int listener = acceptor->listener();
  ASSIGN_OR_RETURN(auto guard,
                   GuardedConnections::Start(
                       acceptor->address().DebugString(), transport,
                       {.most_streams = limits.streams, .most_held_bytes = limits.incomplete_bytes},
                       [connections, listener](int connection) {
                         grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
                         parameters.listener_fd = listener;
                         parameters.fd = connection;
                         connections->HandleNewConnection(&parameters);
                       }));
  acceptor->Start([guard = guard.get()](int connection) { guard->Add(connection); });
  std::string real = acceptor->address().DebugString();
  return GrpcListener{std::move(guard), std::move(server), std::move(acceptor), std::move(real)};
}

}  // namespace meshfill
