// `meshfill bench kv`: FetchKv beside a raw gRPC stream of the same bytes.
#ifndef MESHFILL_SERVER_CLI_BENCH_BENCH_KV_H_
#define MESHFILL_SERVER_CLI_BENCH_BENCH_KV_H_

#include <memory>

#include "server/cli/commands/command.h"

namespace meshfill {

std::unique_ptr<Command> AddBenchKvCommand(CLI::App& parent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_BENCH_KV_H_
