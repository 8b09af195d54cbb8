#include "server/access/server_tls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "kernels/return_if_error.h"
#include "server/observe/log.h"

namespace meshfill {
namespace {

constexpr unsigned kLookSeconds = 1;  // how often gRPC reads the memory files

// A descriptor of an anonymous file with this text.
absl::StatusOr<int> WriteMemory(const std::string& text) {
  const int fd = memfd_create("tls", MFD_CLOEXEC);
  if (fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size())) return fd;
  const int error = errno;
  if (fd >= 0) close(fd);
  return absl::UnavailableError(
      absl::StrCat("a certificate cannot be kept in memory: ", std::strerror(error), "; raise ulimit -n"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryFile>> MemoryFile::Make(const std::string& text) {
  ASSIGN_OR_RETURN(const int fd, WriteMemory(text));
  return std::unique_ptr<MemoryFile>(new MemoryFile(fd));
}

MemoryFile::~MemoryFile() { close(fd_); }

std::string MemoryFile::path() const { return absl::StrCat("/proc/self/fd/", fd_); }

absl::Status MemoryFile::Replace(const std::string& text) {
  ASSIGN_OR_RETURN(const int fd, WriteMemory(text));
  const bool replaced = dup3(fd, fd_, O_CLOEXEC) >= 0;
  close(fd);
  return replaced ? absl::OkStatus() : absl::UnavailableError("a certificate cannot be replaced in memory");
}

absl::StatusOr<std::unique_ptr<ServerTls>> ServerTls::Open(const TlsFiles& files, bool client_certificates) {
  using grpc::experimental::FileWatcherCertificateProvider;
  std::unique_ptr<ServerTls> tls(new ServerTls(files));
  ASSIGN_OR_RETURN(TlsPems pems, ReadTlsFiles(files, TlsSide::kServer));
  ASSIGN_OR_RETURN(tls->identity_, MemoryFile::Make(""));
  ASSIGN_OR_RETURN(tls->authorities_, MemoryFile::Make(""));
  RETURN_IF_ERROR(tls->Take(std::move(pems)));
  const std::string identity = tls->identity_->path();
  const auto provider = client_certificates ? std::make_shared<FileWatcherCertificateProvider>(
                                                  identity, identity, tls->authorities_->path(), kLookSeconds)
                                            : std::make_shared<FileWatcherCertificateProvider>(
                                                  identity, identity, kLookSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (client_certificates) options.watch_root_certs();
  options.set_cert_request_type(client_certificates
                                    ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  tls->credentials_ = grpc::experimental::TlsServerCredentials(options);
  tls->watch_.Start([tls = tls.get()] { tls->Reload(); });
  return tls;
}

absl::Status ServerTls::Take(TlsPems pems) {
  RETURN_IF_ERROR(identity_->Replace(absl::StrCat(pems.key, "\n", pems.cert)));
  if (pems.ca != pems_.ca) RETURN_IF_ERROR(authorities_->Replace(pems.ca));
  pems_ = std::move(pems);
  return absl::OkStatus();
}

void ServerTls::Reload() {
  absl::StatusOr<TlsPems> pems = ReadTlsFiles(files_, TlsSide::kServer);
  if (pems.ok() && *pems == pems_) return;
  const absl::Status taken = pems.ok() ? Take(*std::move(pems)) : pems.status();
  if (taken.ok())
    return Log(absl::StrCat("new connections get the certificate that is now in ", files_.cert));
  Log(absl::StrCat("the certificate stays as it was: ", taken.message()), {.level = LogLevel::kWarning});
}

}  // namespace meshfill
