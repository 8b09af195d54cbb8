// How a port, or a connection between Meshfill's processes, is protected: TLS, or plain text where that is
// safe. The control plane (pool.tls) wants certificates on both sides; the API and kv.listen (api.tls) want
// the server's, and clients' where the configuration says so.
#ifndef MESHFILL_SERVER_ACCESS_TRANSPORT_H_
#define MESHFILL_SERVER_ACCESS_TRANSPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "grpcpp/security/credentials.h"
#include "meshfill/v1/config.pb.h"
#include "server/access/peer_names.h"
#include "server/access/server_tls.h"
#include "server/config/address.h"

namespace meshfill {

// What a port speaks. It lives as long as the port is open: it takes changed files over.
struct ServerTransport {
  std::shared_ptr<const ServerTls> tls;  // null: plain text
  std::shared_ptr<PeerNames> peers = std::make_shared<PeerNames>();
};

// Errors of the functions below: INVALID_ARGUMENT as ReadTlsFiles has it; and where there is no certificate,
// the address is not of this machine alone, and `insecure` is not set.

// The leader listens with the first, a worker joins with the second. `address`: to listen on, or to join.
absl::StatusOr<ServerTransport> ControlServerTransport(const v1::PoolSection::Tls& tls,
                                                       const HostPort& address);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ControlChannelCredentials(
    const v1::PoolSection::Tls& tls, const HostPort& address);

// The API's port and a worker's kv.listen listen with this. `address`: numeric, to listen on.
absl::StatusOr<ServerTransport> ApiServerTransport(const v1::ApiSection::Tls& tls, const HostPort& address);
// The front-end connects to its workers' kv.listen with this: TLS where api.tls.ca is set.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> HolderChannelCredentials(
    const v1::ApiSection::Tls& tls);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_TRANSPORT_H_
