// A server's side of TLS. Its files may change while the port is open: connections that begin afterwards see
// the new certificate, those that are there go on. Files that ReadTlsFiles refuses change nothing, and the
// log tells of them. Thread-safe.
#ifndef MESHFILL_SERVER_ACCESS_SERVER_TLS_H_
#define MESHFILL_SERVER_ACCESS_SERVER_TLS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/mutex.h"
#include "server/access/file_watch.h"
#include "server/access/openssl_handles.h"
#include "server/access/tls_files.h"

namespace meshfill {

class ServerTls {
 public:
  // Clients show a certificate that files.ca signed, where they must. Errors: those of ReadTlsFiles.
  static absl::StatusOr<std::unique_ptr<ServerTls>> Open(const TlsFiles& files, bool client_certificates);

  // A connection over `socket`, which it does not own, before its handshake. Null: no memory. TLS 1.2 or 1.3,
  // for HTTP/2 (ALPN "h2"). A handshake that ends well has a certificate that was asked for.
  TlsConnection Accept(int socket) const;

  // After the handshake: the client's certificate's common name and DNS names. Empty: it has shown none.
  static std::vector<std::string> NamesOfClient(const SSL& connection);

 private:
  ServerTls(const TlsFiles& files, bool client_certificates)
      : files_(files), client_certificates_(client_certificates), watch_({files.cert, files.key, files.ca}) {}
  absl::Status Take(TlsPems pems);
  void Reload();

  const TlsFiles files_;
  const bool client_certificates_;
  TlsPems pems_;  // in context_; the watch's thread changes it
  mutable Mutex mu_;
  TlsContext context_ ABSL_GUARDED_BY(mu_);
  FileWatch watch_;  // last: its thread uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_SERVER_TLS_H_
