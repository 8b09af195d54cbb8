// Ranks in any mix of processes and threads, over TCP with gloo.
//
// The rendezvous needs no files and no service: every rank listens, tells its address as bytes, is given all
// ranks' addresses, and connects to exactly those. The bytes travel over the leader's control stream.
//
//     GlooEndpoint::Listen ──address()──► leader ──all addresses──► Connect ──► Communicator
//
// One endpoint belongs to one rank and one run. Abort may come from any thread, before, during and after
// Connect.
//
// Trust: an address holds a secret of its endpoint. Who connects to the data port without it is dropped,
// however much it sends and wherever it stops; who has it can read and write the run's data. So can whoever
// reads the network, unless the ranks encrypt: then all after the secrets is TLS 1.3 (tls_channel.h).
//
// Every message carries its run, operation, sequence number and size, and a checksum of its payload; where
// the ranks encrypt, TLS's tag takes the checksum's place. A wait ends with
//   DATA_LOSS          the payload, or a byte that TLS protects, is not what the peer sent
//   INTERNAL           the peer is at another message: the ranks have diverged
//   UNAVAILABLE        the connection with the peer is gone: it died, aborted, or ended its run; or so is
//                      that with another peer before it took what this rank sent it
//   DEADLINE_EXCEEDED  nothing came; other waits go on
// and the reason of Abort goes before all of them. A run in which a wait has failed is to be aborted.
//
// Cost of a message: its bytes cross the wire once, out of and into buffers of the stream (host memory),
// after one round trip in which the receiver says that it is ready; a checksum reads them once on each side,
// on the rank's thread. Each rank has one thread for its sockets, and TLS's ciphers run on that. Memory: what
// was sent is held until it has left.
#ifndef MESHFILL_ENGINE_COMM_GLOO_GLOO_H_
#define MESHFILL_ENGINE_COMM_GLOO_GLOO_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/comm/endpoint.h"
#include "kernels/stop_token.h"

namespace meshfill {

struct GlooOptions {
  std::string listen = "127.0.0.1";  // a host name, an address, or a network interface ("eth0")
  int rank = 0;
  int ranks = 1;
  uint64_t run = 0;      // tells this run's messages from those of any other; the same on all ranks
  bool checksum = true;  // each payload that this rank sends in plain text carries a checksum
  bool encrypt = false;  // the same on all ranks
  const StopToken* stop = nullptr;  // the run's; its pauses are no part of a wait; null: the run has none
};

// Connect: what cannot be reached is named by its rank. Messages are received into buffers of the stream
// (host memory). The communicator's destructor waits until what it sent has left, at most a minute, unless it
// was aborted. Abort ends its peers' waits for this rank, too, with UNAVAILABLE.
class GlooEndpoint : public Endpoint {
 public:
  // INVALID_ARGUMENT: no such interface or host. UNAVAILABLE: it cannot be bound. Ignores SIGPIPE from now
  // on, in the whole process, unless the process handles it: gloo writes to sockets whose peer may be gone.
  static absl::StatusOr<std::unique_ptr<GlooEndpoint>> Listen(const GlooOptions& options);
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_GLOO_GLOO_H_
