// What every rank of a strategy does, in order: the executor's steps with their messages, bytes and FLOPs,
// and no data.
//
// All strategies are symmetric: one list of actions serves all ranks, and a channel says for each rank whose
// message it receives. As in engine/run/executor.h a step is kStart, kCompute, kWait; double rings keep two
// messages under way. Memory is that of the program's order: a buffer lives from its kStart (or first block)
// until its last use.
#ifndef MESHFILL_ENGINE_SIM_RANK_PROGRAM_H_
#define MESHFILL_ENGINE_SIM_RANK_PROGRAM_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/mesh/traffic.h"

namespace meshfill::sim {

struct Channel {
  Traffic traffic = Traffic::kQ;
  std::vector<int> from;  // [ranks]: a permutation; a rank that receives from itself pays nothing
};

enum class ActionKind {
  kStart,    // send one message of `bytes` on the channel; the same is then to be received from from[rank]
  kWait,     // stand still until the oldest message of the channel not yet waited for is here
  kCompute,  // `blocks` blocks of `flops` FLOPs together
};

struct Action {
  ActionKind kind = ActionKind::kCompute;
  int channel = 0;
  int blocks = 0;
  double bytes = 0;
  double flops = 0;
};

struct RankProgram {
  int ranks = 0;
  std::vector<Channel> channels;
  std::vector<Action> actions;
  PerTraffic<int64_t> sent_bytes;  // by one rank
  int64_t peak_bytes = 0;
};

class ProgramBuilder {
 public:
  explicit ProgramBuilder(int ranks) { program_.ranks = ranks; }

  int AddChannel(Traffic traffic, std::vector<int> from);  // returns its index
  void Start(int channel, int64_t bytes);
  void Wait(int channel);
  void Compute(double flops, int blocks);  // joined with a computation right before it
  void Take(int64_t bytes);                // memory
  void Give(int64_t bytes);

  RankProgram Build() && { return std::move(program_); }

 private:
  RankProgram program_;
  int64_t live_bytes_ = 0;
};

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_RANK_PROGRAM_H_
