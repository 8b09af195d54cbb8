#include "server/access/transport.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/return_if_error.h"
#include "server/access/tls_files.h"

namespace meshfill {
namespace {

TlsFiles FilesOf(const v1::PoolSection::Tls& tls) { return {"pool.tls.", tls.cert(), tls.key(), tls.ca()}; }
TlsFiles FilesOf(const v1::ApiSection::Tls& tls) { return {"api.tls.", tls.cert(), tls.key(), tls.ca()}; }

absl::Status CheckPlainText(const HostPort& address, bool insecure, absl::string_view files,
                            absl::string_view key) {
  if (insecure || address.IsThisMachine()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(address.DebugString(), " is reachable from other machines and has no certificate; set ",
                   files, ", or ", key, "=true where the network itself is closed"));
}

constexpr char kControlFiles[] = "pool.tls.cert, key and ca";

absl::StatusOr<ServerTransport> TlsServer(const TlsFiles& files, bool client_certificates) {
  ASSIGN_OR_RETURN(std::shared_ptr<const ServerTls> tls, ServerTls::Open(files, client_certificates));
  return ServerTransport{.tls = std::move(tls)};
}

std::shared_ptr<grpc::ChannelCredentials> TlsChannel(const TlsPems& pems) {
  return grpc::SslCredentials(
      {.pem_root_certs = pems.ca, .pem_private_key = pems.key, .pem_cert_chain = pems.cert});
}

}  // namespace

absl::StatusOr<ServerTransport> ControlServerTransport(const v1::PoolSection::Tls& tls,
                                                       const HostPort& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(address, tls.insecure(), kControlFiles, "pool.tls.insecure"));
    return ServerTransport();
  }
  return TlsServer(FilesOf(tls), /*client_certificates=*/true);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ControlChannelCredentials(
    const v1::PoolSection::Tls& tls, const HostPort& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(address, tls.insecure(), kControlFiles, "pool.tls.insecure"));
    return grpc::InsecureChannelCredentials();
  }
  ASSIGN_OR_RETURN(const auto pems, ReadTlsFiles(FilesOf(tls), TlsSide::kClient));
  return TlsChannel(pems);
}

absl::StatusOr<ServerTransport> ApiServerTransport(const v1::ApiSection::Tls& tls, const HostPort& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(address, tls.insecure(), "api.tls.cert and key", "api.tls.insecure"));
    return ServerTransport();
  }
  return TlsServer(FilesOf(tls), tls.client_certificates());
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> HolderChannelCredentials(
    const v1::ApiSection::Tls& tls) {
  if (tls.ca().empty()) return grpc::InsecureChannelCredentials();
  TlsFiles files = FilesOf(tls);
  if (!tls.client_certificates()) files.cert = files.key = "";  // nobody asks for one
  ASSIGN_OR_RETURN(const auto pems, ReadTlsFiles(files, TlsSide::kClient));
  return TlsChannel(pems);
}

}  // namespace meshfill
