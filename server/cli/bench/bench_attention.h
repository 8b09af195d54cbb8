// `meshfill bench attention`: the attention block against the machine's register loop.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_ATTENTION_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_ATTENTION_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchAttentionCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_ATTENTION_H_
