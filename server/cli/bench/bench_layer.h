// `meshfill bench layer`: one whole layer of a model's shape, as a rank runs it.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_LAYER_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_LAYER_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchLayerCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_LAYER_H_
