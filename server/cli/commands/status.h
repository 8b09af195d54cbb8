// `meshfill status`: what runs on a server, what waits, and who is there.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_STATUS_H_
#define MESHFILL_SERVER_CLI_COMMANDS_STATUS_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddStatusCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_STATUS_H_
