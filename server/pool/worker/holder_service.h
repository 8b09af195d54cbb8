// The port at which a worker serves the K and V that it holds: PrefillService, of which it answers FetchKv
// alone, and grpc.health.v1. Protected as the front-end's API (api.tls).
#ifndef MESHFILL_SERVER_POOL_WORKER_HOLDER_SERVICE_H_
#define MESHFILL_SERVER_POOL_WORKER_HOLDER_SERVICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "meshfill/v1/config.pb.h"
#include "server/api/kv_leases.h"

namespace meshfill {

constexpr char kWorkerHealthService[] = "meshfill.v1.Worker";

class HolderService {
 public:
  // Listens at `listen`, HOST:PORT; the host may be a network interface. INVALID_ARGUMENT: no such host, or
  // every interface, which is no address that others could connect to; or as ApiServerTransport and
  // Access::Open have it. UNAVAILABLE: the port is in use. `held` outlives the service.
  static absl::StatusOr<std::unique_ptr<HolderService>> Start(const std::string& listen,
                                                              const v1::Config& config, KvSource& held);
  ~HolderService();  // ends the calls that are left

  // Health of kWorkerHealthService: SERVING while the worker belongs to a pool; not at first. Health of ""
  // says that the process lives. From any thread.
  void SetMember(bool member);

  const std::string& address() const;  // HOST:PORT, numeric, the real port

 private:
  class Service;  // keeps gRPC's headers out of this one
  explicit HolderService(std::unique_ptr<Service> service);
  std::unique_ptr<Service> service_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_HOLDER_SERVICE_H_
