// Many clients of one server: each sends its prompt when it is due, and where the server says when to try
// again, it does so then. Prompts are of random tokens.
#ifndef MESHFILL_SERVER_CLI_BENCH_LOAD_CLIENTS_H_
#define MESHFILL_SERVER_CLI_BENCH_LOAD_CLIENTS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/cli/bench/load_figures.h"
#include "server/cli/server_channel.h"

namespace meshfill {

// What became of a prompt. Seconds are from the load's begin where they are no durations.
struct LoadOutcome {
  absl::Status status;
  double accepted_at = 0;  // the last try
  double ended_at = 0;
  // Seconds from accepted_at: as Accepted predicts them, and as the result states them. What a prompt took in
  // all has the answer's way, too.
  double predicted_wait_seconds = 0, predicted_prefill_seconds = 0;
  double wait_seconds = 0, prefill_seconds = 0;
  std::vector<uint32_t> top;            // the answer's best tokens, best first
  std::vector<double> refusal_seconds;  // each try that was refused and is to come again: until it was told
};

struct LoadOptions {
  uint32_t vocab = 1;
  int most_at_once = 96;  // calls at a time; what is due waits
  uint64_t seed = 1;      // the tokens of the prompt at place i are those of seed + i, at place 0
  bool ignore_cache = false;
};

// Sends them all, and waits for their ends; blocks. By prompt.
std::vector<LoadOutcome> SendLoad(const ServerChannel& server, std::span<const LoadPrompt> prompts,
                                  const LoadOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_BENCH_LOAD_CLIENTS_H_
