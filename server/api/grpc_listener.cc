#include "server/api/grpc_listener.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {

absl::StatusOr<GrpcListener> ListenAt(HostPort address,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials,
                                      grpc::ServerBuilder& builder) {
  int port = 0;
  builder.AddListeningPort(address.DebugString(), credentials, &port);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address.DebugString(), "; choose another port"));
  }
  address.port = static_cast<uint16_t>(port);
  return GrpcListener{.server = std::move(server), .address = address.DebugString()};
}

}  // namespace meshfill
