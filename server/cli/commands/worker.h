// `meshfill worker`: a process of a pool.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_WORKER_H_
#define MESHFILL_SERVER_CLI_COMMANDS_WORKER_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddWorkerCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_WORKER_H_
