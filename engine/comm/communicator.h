// The seam to a network between ranks: asynchronous chunk transfer with a deadline on every wait.
//
// One Communicator belongs to one rank and one run, and is used from that rank's thread; Abort may come from
// any thread. Messages between a pair of ranks match in the order of their calls, each traffic for itself.
//
// Cost per call: one message out, one message in. The in-process communicator hands over the reference (no
// bytes are copied, a sent buffer must not be written again); others copy into a buffer of the rank's stream.
#ifndef MESHFILL_ENGINE_COMM_COMMUNICATOR_H_
#define MESHFILL_ENGINE_COMM_COMMUNICATOR_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/mesh/traffic.h"
#include "kernels/buffer.h"

namespace meshfill {

// A receive under way. Wait once.
class PendingReceive {
 public:
  virtual ~PendingReceive() = default;
  // Blocks until the message is there. DEADLINE_EXCEEDED, ABORTED or what the peer failed with, naming the
  // rank, the operation and the peer. `deadline`, as everywhere, is by MonotonicNow
  // (kernels/monotonic_time.h).
  virtual absl::StatusOr<BufferRef> Wait(absl::Time deadline) = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Starts sending `message` to `to` and receiving one of `receive_bytes` from `from`.
  virtual absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to,
                                                                      BufferRef message, int from,
                                                                      size_t receive_bytes) = 0;

  // The same into memory of the host that is there already: Wait answers with `into` itself. The message of
  // a transport that can is received there, the other ones' are copied. A receive that fails may still write
  // to it until the communicator has gone.
  virtual absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceiveInto(Traffic traffic, int to,
                                                                          BufferRef message, int from,
                                                                          BufferRef into);

  // Ends every wait of every rank of this run with `reason`, now and in future. The first reason stays.
  virtual void Abort(absl::Status reason) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_COMMUNICATOR_H_
