// How commands reach a server: whom they trust, and who they are.
#ifndef MESHFILL_SERVER_CLI_SERVER_CHANNEL_H_
#define MESHFILL_SERVER_CLI_SERVER_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Channel;
class ClientContext;
}  // namespace grpc

namespace meshfill {

// What the options of a command that connects to a server say.
struct ServerOptions {
  std::string address;  // HOST:PORT
  bool tls = false;     // encrypt; also implied by `ca` and by `cert`
  std::string ca;       // file of the authorities to trust; empty: the system's
  std::string cert, key;
  std::string server_name;  // in the server's certificate; empty: the address's host
  std::string token_file;   // empty: the environment's MESHFILL_TOKEN, or none
  // A server that is silent for so long while a call waits is pinged, and is gone if it does not answer in
  // time. Servers allow a ping every 10 s.
  absl::Duration ping_time = absl::Minutes(1);
  absl::Duration ping_timeout = absl::Seconds(20);
};

class ServerChannel {
 public:
  // Connects to nothing yet, but starts threads of gRPC: make a CancelWatch before. INVALID_ARGUMENT: a file
  // cannot be read, or is no certificate, key or token.
  static absl::StatusOr<ServerChannel> Open(const ServerOptions& options);

  const std::string& address() const { return address_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  void Authorize(grpc::ClientContext& context) const;  // adds the token

 private:
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::string token_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_SERVER_CHANNEL_H_
