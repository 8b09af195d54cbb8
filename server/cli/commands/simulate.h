// `meshfill simulate`: what strategies would take on a cluster that is not here.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_SIMULATE_H_
#define MESHFILL_SERVER_CLI_COMMANDS_SIMULATE_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddSimulateCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_SIMULATE_H_
