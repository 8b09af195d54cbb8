// The PEM files of one side of TLS, read and checked at once: gRPC itself would only log what is wrong with
// them, or refuse each handshake without a word.
#ifndef MESHFILL_SERVER_ACCESS_TLS_FILES_H_
#define MESHFILL_SERVER_ACCESS_TLS_FILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace meshfill {

struct TlsFiles {
  std::string prefix;         // begins the names in errors: "pool.tls." makes pool.tls.cert
  std::string cert, key, ca;  // paths; empty: none. A certificate and its key come together.
};

// The contents of the files; "" where there is no file.
struct TlsPems {
  std::string cert, key, ca;

  bool operator==(const TlsPems&) const = default;
};

enum class TlsSide {
  kServer,  // the certificate is shown to clients
  kClient,  // it is shown to servers
};

// INVALID_ARGUMENT, in one line that names key, file and remedy: a file that cannot be read, is empty, or is
// not PEM; a certificate that has expired, is not valid yet, is not for this side, or is too weak for
// OpenSSL; a chain out of order; a key that is encrypted or another certificate's; authorities that are none.
absl::StatusOr<TlsPems> ReadTlsFiles(const TlsFiles& files, TlsSide side);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_TLS_FILES_H_
