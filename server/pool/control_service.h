// The leader's end of the control streams: carries messages, knows nothing of what they mean.
//
// Thread-safe. A listener's calls for one connection come one after another; they come without a lock of this
// class, and the listener may call back in.
#ifndef MESHFILL_SERVER_POOL_CONTROL_SERVICE_H_
#define MESHFILL_SERVER_POOL_CONTROL_SERVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "meshfill/v1/config.pb.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

class ControlService {
 public:
  using Connection = uint64_t;

  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnConnected(Connection connection) = 0;
    virtual void OnMessage(Connection connection, const v1::WorkerMessage& message) = 0;
    virtual void OnDisconnected(Connection connection) = 0;  // once, last
  };

  // Binds pool.control_listen. UNAVAILABLE: the port is in use; else as ControlServerTransport. The
  // listener outlives the service.
  static absl::StatusOr<std::unique_ptr<ControlService>> Start(const v1::PoolSection& pool,
                                                               Listener& listener);
  ~ControlService();  // ends all streams

  const std::string& address() const;  // HOST:PORT, the real port

  void Send(Connection connection,
            v1::LeaderMessage message);  // queued; dropped where the connection is gone
  void Close(Connection connection);     // after what was sent

 private:
  class Service;  // keeps gRPC's headers out of this one
  explicit ControlService(std::unique_ptr<Service> service);
  std::unique_ptr<Service> service_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_CONTROL_SERVICE_H_
