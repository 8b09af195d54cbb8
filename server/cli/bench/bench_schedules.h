// `meshfill bench schedules`: Algorithm 2 and the schedule of least time against an exact search, over all
// small tiles.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_SCHEDULES_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_SCHEDULES_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchSchedulesCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_SCHEDULES_H_
