// What the certificates of live connections call their clients.
//
// A port ends TLS before gRPC has a byte (server/listener/guarded_connections.h). gRPC knows such a
// connection by a name alone: that of the socket's other end, in this process, which no connection has had
// before. This tells whose it is. Thread-safe.
#ifndef MESHFILL_SERVER_ACCESS_PEER_NAMES_H_
#define MESHFILL_SERVER_ACCESS_PEER_NAMES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "kernels/mutex.h"

namespace meshfill {

class PeerNames {
 public:
  using Names = std::vector<std::string>;

  // Names `socket`, one end of a socket pair, by a name of its own, under which `names` are found until
  // Remove. Empty: the system refuses.
  std::string Add(int socket, Names names);
  void Remove(const std::string& connection);

  // `peer`: what gRPC says that a call comes from. Empty: its connection has shown no certificate, or is
  // gone.
  Names Of(absl::string_view peer) const;

 private:
  mutable Mutex mu_;
  std::map<std::string, Names, std::less<>> names_ ABSL_GUARDED_BY(mu_);  // by connection
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_PEER_NAMES_H_
