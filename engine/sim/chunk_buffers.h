// Chunks of one kind on one rank (Q or KV), by local index: memory is taken when a receive starts and given
// back after the chunk's last use, which is a block or the send that passes it on. For programs without a
// forward schedule: backward passes, and lanes. Chunks of a forward schedule live as schedule_walk.h says.
#ifndef MESHFILL_ENGINE_SIM_CHUNK_BUFFERS_H_
#define MESHFILL_ENGINE_SIM_CHUNK_BUFFERS_H_

#include <cstdint>
#include <vector>

#include "engine/sim/rank_program.h"

namespace meshfill::sim {

class ChunkBuffers {
 public:
  // `count` chunks, the first here from the start; each serves `blocks` blocks. `keep`: none is given back
  // before GiveKept.
  ChunkBuffers(ProgramBuilder& builder, int64_t bytes, int count, int blocks, bool keep)
      : builder_(builder), bytes_(bytes), uses_(count, blocks + 1), keep_(keep) {
    uses_.back() = blocks;  // nobody asks for the last one
    builder_.Take(bytes);
  }

  void StartReceive() { builder_.Take(bytes_); }
  void EndReceive() { Use(received_++); }  // the send of the chunk before it has ended with it
  void Use(int index) {
    if (--uses_[index] == 0 && !keep_) builder_.Give(bytes_);
  }
  void GiveKept() {
    if (keep_) builder_.Give(bytes_ * (received_ + 1));
  }
  int here() const { return received_ + 1; }

 private:
  ProgramBuilder& builder_;
  const int64_t bytes_;
  std::vector<int> uses_;
  const bool keep_;
  int received_ = 0;
};

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_CHUNK_BUFFERS_H_
