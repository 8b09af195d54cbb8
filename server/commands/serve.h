// `meshfill serve`: the server itself.
#ifndef MESHFILL_SERVER_COMMANDS_SERVE_H_
#define MESHFILL_SERVER_COMMANDS_SERVE_H_

#include <memory>

#include "server/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddServeCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_COMMANDS_SERVE_H_
