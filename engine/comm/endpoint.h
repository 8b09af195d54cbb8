// Where a rank meets its peers before a run: it tells its address as bytes, is given all ranks' addresses,
// and connects.
//
//     Listen ──address()──► leader ──all addresses──► Connect ──► Communicator
//
// One endpoint belongs to one rank and one run. Abort may come from any thread, before, during and after
// Connect.
#ifndef MESHFILL_ENGINE_COMM_ENDPOINT_H_
#define MESHFILL_ENGINE_COMM_ENDPOINT_H_

#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "kernels/stream.h"

namespace meshfill {

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual const std::string& address() const = 0;  // opaque bytes, for every peer and nobody else

  // Connects with all ranks, once; `addresses` by rank, this rank's own included. Blocks until the last pair
  // stands. INVALID_ARGUMENT for an address that is of another run, rank or kind, or none at all;
  // DEADLINE_EXCEEDED or UNAVAILABLE; the reason of Abort. Messages are received into buffers of `stream`,
  // which outlives the communicator; the communicator may outlive the endpoint.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Connect(std::span<const std::string> addresses,
                                                                Stream& stream, absl::Time deadline) = 0;

  // Once Connect has returned: connections that it dropped, for they did not say the hello of a peer.
  virtual int strangers() const { return 0; }

  // Ends Connect and every wait of the communicator at once with `reason`. The first reason stays.
  virtual void Abort(absl::Status reason) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_ENDPOINT_H_
