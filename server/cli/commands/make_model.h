// `meshfill make-model`: a model of random weights, for demos and benchmarks.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_MAKE_MODEL_H_
#define MESHFILL_SERVER_CLI_COMMANDS_MAKE_MODEL_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddMakeModelCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_MAKE_MODEL_H_
