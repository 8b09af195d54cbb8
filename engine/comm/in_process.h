// Ranks as threads of one process: chunks are handed over by reference.
#ifndef MESHFILL_ENGINE_COMM_IN_PROCESS_H_
#define MESHFILL_ENGINE_COMM_IN_PROCESS_H_

#include <memory>
#include <span>
#include <vector>

#include "engine/comm/communicator.h"
#include "kernels/stop_token.h"
#include "kernels/stream.h"

namespace meshfill {

// One communicator for each of `ranks` ranks, connected with each other; they may outlive one another.
std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int ranks);

// One communicator for each of these streams, by rank, which may queue their operations and outlive the
// communicators. A message is sent when the operations called before have run, and a wait ends at once on the
// host: the operations called after it wait on the device. Chunks on another device are copied there by the
// sender. The deadline of a wait moves on by the time that the run is paused meanwhile; `run`, its token, may
// be null, and outlives the waits.
std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(std::span<Stream* const> streams,
                                                                      const StopToken* run = nullptr);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_IN_PROCESS_H_
