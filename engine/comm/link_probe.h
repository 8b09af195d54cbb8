// How fast the links of a run are, measured with messages over its own communicator before its first layer.
//
// Ranks exchange messages in pairs, all pairs at once, each rank sending while it receives as it does in a
// ring; messages grow until one takes long enough to tell. After each exchange the two tell each other what
// it took, and take the smaller of both: the one of the two that began later did not wait for the other. So
// both know the same figures, and decide alike whether to go on.
//
//     8 B  8 B  …  8 B │ 8 KiB 8 KiB 8 KiB │ 32 KiB 32 KiB 32 KiB │ … until one takes 25 ms, at most 8 MiB
//     └─ latency: their median          └─ bytes/s: the last size's best one, without the latency
//
// Cost per rank: at most 32 MiB each way, on a fast link. On a slow one the last size takes less than twice
// 100 ms, and all those before it half as long: 0.3 s, unless 8 KiB alone take longer.
#ifndef MESHFILL_ENGINE_COMM_LINK_PROBE_H_
#define MESHFILL_ENGINE_COMM_LINK_PROBE_H_

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/mesh/topology.h"
#include "kernels/stream.h"

namespace meshfill {

// Which ranks measure a link with each other, the same on all ranks.
struct LinkProbe {
  std::vector<int> peer_of_rank;  // its own: it sits out

  bool operator==(const LinkProbe&) const = default;
};

// Whether each of `ranks` ranks has one peer, whose peer it is.
bool IsPairing(const LinkProbe& probe, int ranks);

// This rank's part; none: it sits out. The probe is a pairing of the communicator's ranks. `wait_timeout` is
// for each message. Errors: those of the communicator and of the stream's memory.
absl::StatusOr<std::optional<Link>> Probe(const LinkProbe& probe, Communicator& communicator, Stream& stream,
                                          absl::Duration wait_timeout);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_LINK_PROBE_H_
