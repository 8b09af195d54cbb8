// `meshfill bench prefill`: whole prefills, one plan against another in turns.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_PREFILL_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_PREFILL_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchPrefillCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_PREFILL_H_
