// `meshfill bench`: speed figures, as ratios measured in one run.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_H_
