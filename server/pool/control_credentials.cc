#include "server/pool/control_credentials.h"

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
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
  ASSIGN_OR_RETURN(auto cert, ReadPem(tls.cert(), "cert"));
  ASSIGN_OR_RETURN(auto key, ReadPem(tls.key(), "key"));
  ASSIGN_OR_RETURN(auto ca, ReadPem(tls.ca(), "ca"));
  return PemTexts{std::move(cert), std::move(key), std::move(ca)};
}

absl::Status CheckPlainText(const v1::PoolSection::Tls& tls, const std::string& address) {
  ASSIGN_OR_RETURN(const auto host_port, ParseHostPort(address));
  const std::string& host = host_port.host;
  const bool this_machine = host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
  if (this_machine || tls.insecure()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the control plane on ", address,
      " is reachable from other machines and has no certificates; set pool.tls.cert, key and ca, or "
      "pool.tls.insecure=true"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ControlServerCredentials(
    const v1::PoolSection::Tls& tls, const std::string& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(tls, address));
    return grpc::InsecureServerCredentials();
  }
  ASSIGN_OR_RETURN(auto pems, ReadPems(tls));
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = pems.ca;
  options.pem_key_cert_pairs.push_back({pems.key, pems.cert});
  return grpc::SslServerCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ControlChannelCredentials(
    const v1::PoolSection::Tls& tls, const std::string& address) {
  if (tls.cert().empty()) {
    RETURN_IF_ERROR(CheckPlainText(tls, address));
    return grpc::InsecureChannelCredentials();
  }
  ASSIGN_OR_RETURN(auto pems, ReadPems(tls));
  return grpc::SslCredentials(
      {.pem_root_certs = pems.ca, .pem_private_key = pems.key, .pem_cert_chain = pems.cert});
}

}  // namespace meshfill
