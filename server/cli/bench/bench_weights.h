// `meshfill bench weights`: prompts with weights that stream beside the same with weights that stay.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_WEIGHTS_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_WEIGHTS_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchWeightsCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_WEIGHTS_H_
