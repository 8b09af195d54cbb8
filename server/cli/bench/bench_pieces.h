// `meshfill bench pieces`: a prompt in pieces, in a part of the memory, beside the same prompt whole.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_PIECES_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_PIECES_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchPiecesCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_PIECES_H_
