#include "server/access/transport.h"

#include <string>

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

std::shared_ptr<grpc::ServerCredentials> TlsServer(const TlsPems& pems, bool client_certificates) {
  grpc::SslServerCredentialsOptions options(client_certificates
                                                ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                                : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  if (client_certificates) options.pem_root_certs = pems.ca;
  options.pem_key_cert_pairs.push_back({pems.key, pems.cert});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> TlsChannel(const TlsPems& pems) {
  return grpc::SslCredentials(
      {.pem_root_certs = pems.ca, .pem_private_key = pems.key, .pem_cert_chain = pems.cert});
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ControlServerCredentials(
    const v1::PoolSection::Tls& tls, const HostPort& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(address, tls.insecure(), kControlFiles, "pool.tls.insecure"));
    return grpc::InsecureServerCredentials();
  }
  ASSIGN_OR_RETURN(const auto pems, ReadTlsFiles(FilesOf(tls), TlsSide::kServer));
  return TlsServer(pems, /*client_certificates=*/true);
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

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ApiServerCredentials(const v1::ApiSection::Tls& tls,
                                                                              const HostPort& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(address, tls.insecure(), "api.tls.cert and key", "api.tls.insecure"));
    return grpc::InsecureServerCredentials();
  }
  ASSIGN_OR_RETURN(const auto pems, ReadTlsFiles(FilesOf(tls), TlsSide::kServer));
  return TlsServer(pems, tls.client_certificates());
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
