// Ranks as threads of one process: chunks are handed over by reference.
#ifndef MESHFILL_ENGINE_COMM_IN_PROCESS_H_
#define MESHFILL_ENGINE_COMM_IN_PROCESS_H_

#include <memory>
#include <vector>

#include "engine/comm/communicator.h"

namespace meshfill {

// One communicator for each of `ranks` ranks, connected with each other; they may outlive one another.
std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int ranks);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_IN_PROCESS_H_
