// `meshfill bench experts`: layers of experts beside dense ones of as many FLOPs.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_EXPERTS_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_EXPERTS_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchExpertsCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_EXPERTS_H_
