// A worker's end of the control stream: carries messages, knows nothing of what they mean.
//
// Thread-safe. The listener's calls for one connection come one after another; they come without a lock of
// this class, and the listener may call back in.
#ifndef MESHFILL_SERVER_POOL_WORKER_CONTROL_CLIENT_H_
#define MESHFILL_SERVER_POOL_WORKER_CONTROL_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "meshfill/v1/config.pb.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

class ControlClient {
 public:
  using Connection = uint64_t;  // chosen by the caller

  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnMessage(Connection connection, const v1::LeaderMessage& message) = 0;
    virtual void OnDisconnected(Connection connection, const absl::Status& why) = 0;  // once, last
  };

  // `address`: HOST:PORT of the leader. Errors: those of ControlChannelCredentials. The listener outlives the
  // client.
  static absl::StatusOr<std::unique_ptr<ControlClient>> Make(const std::string& address,
                                                             const v1::PoolSection::Tls& tls,
                                                             Listener& listener);
  ~ControlClient();  // waits for the streams to end

  void Connect(Connection connection);  // replaces the one before; its end is heard of all the same
  void Disconnect(Connection connection);
  void Send(v1::WorkerMessage message);  // on the newest connection; queued

 private:
  class Impl;  // keeps gRPC's headers out of this one
  explicit ControlClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_CONTROL_CLIENT_H_
