// `meshfill bench comm`: messages round a ring of ranks over gloo, with and without their checksums.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_COMM_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_COMM_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchCommCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_COMM_H_
