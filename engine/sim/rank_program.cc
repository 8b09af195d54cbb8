#include "engine/sim/rank_program.h"

#include <algorithm>

namespace meshfill::sim {

int ProgramBuilder::AddChannel(Traffic traffic, std::vector<int> from) {
  program_.channels.push_back({.traffic = traffic, .from = std::move(from)});
  return static_cast<int>(program_.channels.size()) - 1;
}

void ProgramBuilder::Start(int channel, int64_t bytes) {
  program_.sent_bytes[program_.channels[channel].traffic] += bytes;
  program_.actions.push_back(
      {.kind = ActionKind::kStart, .channel = channel, .bytes = static_cast<double>(bytes)});
}

void ProgramBuilder::Wait(int channel) {
  program_.actions.push_back({.kind = ActionKind::kWait, .channel = channel});
}

void ProgramBuilder::Compute(double flops, int blocks) {
  if (!program_.actions.empty() && program_.actions.back().kind == ActionKind::kCompute) {
    program_.actions.back().flops += flops;
    program_.actions.back().blocks += blocks;
    return;
  }
  program_.actions.push_back({.kind = ActionKind::kCompute, .blocks = blocks, .flops = flops});
}

void ProgramBuilder::Take(int64_t bytes) {
  live_bytes_ += bytes;
  program_.peak_bytes = std::max(program_.peak_bytes, live_bytes_);
}

void ProgramBuilder::Give(int64_t bytes) { live_bytes_ -= bytes; }

}  // namespace meshfill::sim
