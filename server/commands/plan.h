// `meshfill plan`: what a prefill would run, without running it.
#ifndef MESHFILL_SERVER_COMMANDS_PLAN_H_
#define MESHFILL_SERVER_COMMANDS_PLAN_H_

#include <memory>

#include "server/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddPlanCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_COMMANDS_PLAN_H_
