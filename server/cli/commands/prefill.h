// `meshfill prefill`: one prompt, on a server or on a pool inside this process.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_PREFILL_H_
#define MESHFILL_SERVER_CLI_COMMANDS_PREFILL_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddPrefillCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_PREFILL_H_
