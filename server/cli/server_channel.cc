#include "server/cli/server_channel.h"

#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <utility>

#include "kernels/return_if_error.h"
#include "server/access/bearer_token.h"
#include "server/access/tls_files.h"

namespace meshfill {
namespace {

constexpr char kTokenVariable[] = "MESHFILL_TOKEN";

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Credentials(const ServerOptions& options) {
  if (!options.tls && options.ca.empty() && options.cert.empty()) return grpc::InsecureChannelCredentials();
  const TlsFiles files = {.prefix = "--", .cert = options.cert, .key = options.key, .ca = options.ca};
  ASSIGN_OR_RETURN(const TlsPems pems, ReadTlsFiles(files, TlsSide::kClient));
  return grpc::SslCredentials(
      {.pem_root_certs = pems.ca, .pem_private_key = pems.key, .pem_cert_chain = pems.cert});
}

absl::StatusOr<std::string> Token(const ServerOptions& options) {
  if (!options.token_file.empty()) return ReadBearerToken("--token-file", options.token_file);
  const char* const token = std::getenv(kTokenVariable);
  return token == nullptr ? "" : token;
}

}  // namespace

absl::StatusOr<ServerChannel> ServerChannel::Open(const ServerOptions& options) {
  constexpr int kNoLimit = -1;
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);  // the status tells of a failed handshake, in one line
  ASSIGN_OR_RETURN(auto credentials, Credentials(options));
  ServerChannel server;
  server.address_ = options.address;
  ASSIGN_OR_RETURN(server.token_, Token(options));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kNoLimit);  // a result with all logits of a large vocabulary
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.ping_time)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.ping_timeout)));
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // any: a prompt may wait for an hour
  if (!options.server_name.empty()) arguments.SetSslTargetNameOverride(options.server_name);
  server.channel_ = grpc::CreateCustomChannel(options.address, credentials, arguments);
  return server;
}

void ServerChannel::Authorize(grpc::ClientContext& context) const {
  if (!token_.empty()) context.AddMetadata("authorization", BearerHeader(token_));
}

}  // namespace meshfill
