// TLS of a port whose files may change while it is open: connections that begin afterwards see the new
// certificate, those that are there go on. Files that ReadTlsFiles refuses change nothing, and the log tells
// of them.
#ifndef MESHFILL_SERVER_ACCESS_SERVER_TLS_H_
#define MESHFILL_SERVER_ACCESS_SERVER_TLS_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "server/access/file_watch.h"
#include "server/access/tls_files.h"

namespace meshfill {

// A text as a file that is in no file system: what gRPC reads by its path.
class MemoryFile {
 public:
  // UNAVAILABLE: no descriptor is free.
  static absl::StatusOr<std::unique_ptr<MemoryFile>> Make(const std::string& text);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const;
  // Whoever opens the path has the old text or the new one, whole.
  absl::Status Replace(const std::string& text);

 private:
  explicit MemoryFile(int fd) : fd_(fd) {}
  const int fd_;
};

class ServerTls {
 public:
  // Clients show a certificate that files.ca signed, where they must. Errors: those of ReadTlsFiles.
  static absl::StatusOr<std::unique_ptr<ServerTls>> Open(const TlsFiles& files, bool client_certificates);

  const std::shared_ptr<grpc::ServerCredentials>& credentials() const { return credentials_; }

 private:
  explicit ServerTls(const TlsFiles& files) : files_(files), watch_({files.cert, files.key, files.ca}) {}
  absl::Status Take(TlsPems pems);  // into the memory files
  void Reload();

  const TlsFiles files_;
  TlsPems pems_;                          // what gRPC has; the watch's thread changes it
  std::unique_ptr<MemoryFile> identity_;  // key and certificate: one file, so that gRPC always has a pair
  std::unique_ptr<MemoryFile> authorities_;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  FileWatch watch_;  // last: its thread uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_SERVER_TLS_H_
