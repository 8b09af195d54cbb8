// `meshfill bench plan`: what the planner predicts, and chooses, against what the pool of this machine does.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_PLAN_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_PLAN_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchPlanCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_PLAN_H_
