// Ranks in any mix of processes and threads, over TCP with gloo.
//
// The rendezvous needs no files and no service: every rank listens, tells its address as bytes, is given all ranks'
// addresses, and connects to exactly those. The bytes travel over the leader's control stream.
//
//     GlooEndpoint::Listen ──address()──► leader ──all addresses──► Connect ──► Communicator
//
// One endpoint belongs to one rank and one run. Abort may come from any thread, before, during and after Connect.
#ifndef MESHFILL_ENGINE_COMM_GLOO_H_
#define MESHFILL_ENGINE_COMM_GLOO_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "kernels/backend.h"

namespace meshfill {

struct GlooOptions {
  std::string listen = "127.0.0.1";  // a host name, an address, or a network interface ("eth0")
  int rank = 0;
  int ranks = 1;
  uint64_t run = 0;      // tells this run's messages from those of any other; the same on all ranks
  bool checksum = true;  // of every payload
};

class GlooEndpoint {
 public:
  // INVALID_ARGUMENT: no such interface or host. UNAVAILABLE: it cannot be bound.
  static absl::StatusOr<std::unique_ptr<GlooEndpoint>> Listen(const GlooOptions& options);
  virtual ~GlooEndpoint() = default;

  virtual const std::string& address() const = 0;  // opaque bytes, for every peer

  // Connects with all ranks, once; `addresses` by rank, this rank's own included. Blocks until the last pair stands.
  // DEADLINE_EXCEEDED or UNAVAILABLE naming the peer; the reason of Abort. Messages are received into buffers of
  // `backend`, which outlives the communicator; the communicator may outlive the endpoint.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Connect(std::span<const std::string> addresses,
                                                                Backend& backend, absl::Time deadline) = 0;

  // Ends Connect and every wait of the communicator at once with `reason`. The first reason stays.
  virtual void Abort(absl::Status reason) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_GLOO_H_
