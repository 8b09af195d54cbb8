// `meshfill cancel`: ends a prefill on a server.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_CANCEL_H_
#define MESHFILL_SERVER_CLI_COMMANDS_CANCEL_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddCancelCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_CANCEL_H_
