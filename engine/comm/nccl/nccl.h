// GPU ranks of several processes, one on each GPU, over NCCL: NVLink, InfiniBand or sockets, as NCCL finds
// them.
//
// Rank 0's address has an NCCL id; the others' are a greeting. Sends and receives of a call are one
// group on a communication stream of the rank's own, which waits for the operations called before; the
// operations called after a Wait wait for it on the device, and no host does. All ranks make their calls in
// the order of one schedule, so that groups match.
//
//     compute   … q k v ── mark ── blocks ── wait ── blocks that need what came
//     comm                    └ send, receive ──┘
//
// A peer that dies inside one host is not noticed by NCCL: who sees it says Abort, and a wait on the device
// that takes longer than its deadline aborts by itself. After either the run is over; its buffers hold
// anything. An error ends with
//   UNAVAILABLE        NCCL lost a peer or could not set up; its own words are in the message
//   DEADLINE_EXCEEDED  naming the rank, the operation and the peer
// and the reason of Abort goes before both.
//
// Making a communicator takes NCCL a second or more, so that it is kept (nccl_links.h) for a later run of the
// same epoch, ranks and seats. An address names those that its rank has idle: where all ranks have the same
// one, they go on with it, else all make a new one. Rank 0 keeps an id for that case, so that no run leaves
// one unused. Each run that lives has a communicator of its own. Kernels of two that wait for peers share one
// device: who starts runs sees to it that one alone has messages under way (message_gate.h).
//
// Trust: whoever has the id can join; the bytes are neither encrypted nor checked.
#ifndef MESHFILL_ENGINE_COMM_NCCL_NCCL_H_
#define MESHFILL_ENGINE_COMM_NCCL_NCCL_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/comm/endpoint.h"

namespace meshfill {

class NcclLinks;  // nccl_links.h

struct NcclOptions {
  int rank = 0;
  int ranks = 1;
  int device = 0;  // the rank's
  // Most CTAs that NCCL takes from the kernels beside it (CudaDeviceTraits::margin_multiprocessors); 0: NCCL
  // decides.
  int most_ctas = 8;
  uint64_t epoch = 0;
  uint64_t run = 0;                  // for NcclLinks::End
  std::shared_ptr<NcclLinks> links;  // of this rank's seat; null: nothing is kept
};

// FAILED_PRECONDITION: a build without NCCL, or a machine without libnccl. UNAVAILABLE: NCCL cannot listen.
absl::StatusOr<std::unique_ptr<Endpoint>> ListenNccl(const NcclOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_NCCL_NCCL_H_
