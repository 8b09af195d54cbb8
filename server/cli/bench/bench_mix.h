// `meshfill bench mix`: short prompts behind a long one, through the server's queue.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_MIX_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_MIX_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchMixCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_MIX_H_
