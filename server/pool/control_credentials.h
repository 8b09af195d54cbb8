// How the control plane is protected: TLS with a certificate on both sides, or plain text where that is safe.
#ifndef MESHFILL_SERVER_POOL_CONTROL_CREDENTIALS_H_
#define MESHFILL_SERVER_POOL_CONTROL_CREDENTIALS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "meshfill/v1/config.pb.h"

namespace meshfill {

// `address` is HOST:PORT, to listen on or to join. INVALID_ARGUMENT: a file of pool.tls cannot be read; or
// there are no certificates, the address is not of this machine alone, and pool.tls.insecure is not set.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ControlServerCredentials(
    const v1::PoolSection::Tls& tls, const std::string& address);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ControlChannelCredentials(
    const v1::PoolSection::Tls& tls, const std::string& address);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_CONTROL_CREDENTIALS_H_
