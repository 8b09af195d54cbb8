// `meshfill plan`: what a prefill would run, without running it.
#ifndef MESHFILL_SERVER_CLI_COMMANDS_PLAN_H_
#define MESHFILL_SERVER_CLI_COMMANDS_PLAN_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddPlanCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_COMMANDS_PLAN_H_
