// `meshfill serve`: the server itself.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_SERVE_H_
#define MESHFILL_SERVER_CLI_COMMANDS_SERVE_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddServeCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_SERVE_H_
