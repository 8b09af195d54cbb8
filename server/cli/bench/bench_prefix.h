// `meshfill bench prefix`: a prompt that begins like an earlier one beside one that computes all, and what it
// costs to keep K and V for such prompts.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_PREFIX_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_PREFIX_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchPrefixCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_PREFIX_H_
