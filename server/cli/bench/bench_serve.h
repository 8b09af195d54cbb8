// `meshfill bench serve`: a running server under the load of many clients.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_SERVE_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_SERVE_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchServeCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_SERVE_H_
