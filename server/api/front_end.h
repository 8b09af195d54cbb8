// The front-end: the gRPC server with PrefillService, health and reflection.
//
//     Start ──► loading ──Open──► ready ──StartDrain──► draining ──Stop──► closed
//
// Health: "" is SERVING from Start to Stop (the process lives); "meshfill.v1.PrefillService" while ready
// only. Calls come back with UNAVAILABLE while loading; while draining, accepted requests finish, live leases
// are served, and new requests are refused so.
//
// The server's channel takes no compression, bounds messages, streams and pings, and never shares its port.
#ifndef MESHFILL_SERVER_API_FRONT_END_H_
#define MESHFILL_SERVER_API_FRONT_END_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "meshfill/v1/config.pb.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/api/kv_leases.h"
#include "server/observe/last_prefill.h"
#include "server/observe/metrics.h"
#include "server/observe/span_exporter.h"

namespace meshfill {

class FrontEnd {
 public:
  // Binds config.listen. `config` comes from LoadConfig; `metrics` outlives the front-end, and so does
  // `spans`, which takes those of its calls; null: nobody does. UNAVAILABLE: the port is in use.
  static absl::StatusOr<std::unique_ptr<FrontEnd>> Start(const v1::Config& config, Metrics& metrics,
                                                         SpanExporter* spans = nullptr);
  ~FrontEnd();  // Stop

  const std::string& address() const;  // HOST:PORT, the real port

  v1::PoolStatus pool_status() const;  // what GetPool answers; until Stop
  const LastPrefill& last_prefill() const;

  // Call once. `kv`: leases on what the engine keeps, where it has no kv_store of its own; it lives as long
  // as the engine. Null: there are no others.
  void Open(std::unique_ptr<PrefillEngine> engine, KvLeases* kv = nullptr);
  void Refresh();  // call when ranks have come or gone: health says NOT_SERVING while there are none
  // A device of an embedded pool has failed for good: no prefill goes well in this process any more.
  bool lost() const;

  // What stands still for too long, as Liveness::Beat wants it; of an embedded pool alone: the leader of
  // workers looks after their compute loops itself.
  std::string standstill();

  void StartDrain();
  // False where requests or leases are still live at the deadline.
  bool WaitUntilIdle(absl::Time deadline);
  // Ends what is left with UNAVAILABLE and closes the port. Waits for the ranks to stop.
  void Stop();

 private:
  class Service;  // keeps gRPC's headers out of this one
  explicit FrontEnd(std::unique_ptr<Service> service);
  std::unique_ptr<Service> service_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_FRONT_END_H_
