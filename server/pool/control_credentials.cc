#include "server/pool/control_credentials.h"

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/config/address.h"

namespace meshfill {
namespace {

struct PemTexts {
  std::string cert, key, ca;
};

absl::StatusOr<std::string> ReadPem(const std::string& path, const char* field) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || text.str().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("pool.tls.", field, ": ", path, " cannot be read; name a file in PEM"));
  }
  return text.str();
}

absl::StatusOr<PemTexts> ReadPems(const v1::PoolSection::Tls& tls) {
  auto cert = ReadPem(tls.cert(), "cert");
  if (!cert.ok()) return cert.status();
  auto key = ReadPem(tls.key(), "key");
  if (!key.ok()) return key.status();
  auto ca = ReadPem(tls.ca(), "ca");
  if (!ca.ok()) return ca.status();
  return PemTexts{*std::move(cert), *std::move(key), *std::move(ca)};
}

absl::Status CheckPlainText(const v1::PoolSection::Tls& tls, const std::string& address) {
  const auto host_port = ParseHostPort(address);
  if (!host_port.ok()) return host_port.status();
  const std::string& host = host_port->host;
  const bool this_machine = host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
  if (this_machine || tls.insecure()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the control plane on ", address,
      " is reachable from other machines and has no certificates; set pool.tls.cert, key and ca, or "
      "pool.tls.insecure=true"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ControlServerCredentials(
    const v1::PoolSection::Tls& tls, const std::string& address) {
  if (tls.cert().empty()) {
    if (absl::Status status = CheckPlainText(tls, address); !status.ok()) return status;
    return grpc::InsecureServerCredentials();
  }
  auto pems = ReadPems(tls);
  if (!pems.ok()) return pems.status();
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = pems->ca;
  options.pem_key_cert_pairs.push_back({pems->key, pems->cert});
  return grpc::SslServerCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ControlChannelCredentials(
    const v1::PoolSection::Tls& tls, const std::string& address) {
  if (tls.cert().empty()) {
    if (absl::Status status = CheckPlainText(tls, address); !status.ok()) return status;
    return grpc::InsecureChannelCredentials();
  }
  auto pems = ReadPems(tls);
  if (!pems.ok()) return pems.status();
  return grpc::SslCredentials(
      {.pem_root_certs = pems->ca, .pem_private_key = pems->key, .pem_cert_chain = pems->cert});
}

}  // namespace meshfill
