#include "engine/schedule/schedule_cost.h"

#include <algorithm>
#include <vector>

namespace meshfill {
namespace {

// Chunks of Q, or of KV: they arrive in turn, and each is passed on while the next arrives.
class ChunkLives {
 public:
  ChunkLives(int chunks, int blocks_each) : uses_left_(chunks, blocks_each + 1) {
    --uses_left_.back();  // the last is not passed on
  }

  // Each returns how many chunks that frees: 0 or 1.
  int Use(int chunk) { return --uses_left_[chunk] == 0 ? 1 : 0; }
  int PassOnNext() { return Use(passed_on_++); }

 private:
  std::vector<int> uses_left_;  // blocks, and the send
  int passed_on_ = 0;
};

class MemoryWalk {
 public:
  MemoryWalk(const Schedule& schedule, OverlapCosts costs)
      : schedule_(schedule),
        costs_(costs),
        q_(schedule.tile.a, schedule.tile.b),
        kv_(schedule.tile.b, schedule.tile.a),
        begun_(schedule.tile.a, false) {}

  int64_t Run() {
    Add(costs_.c_q + costs_.c_kv);  // the rank's own
    for (const Step& step : schedule_.steps) {
      Add(CommBlocks(step.comm, costs_));
      for (const BlockIndex& block : step.blocks) RunBlock(block);
      EndComm(step.comm);
    }
    return peak_;
  }

 private:
  void Add(int64_t cost) { peak_ = std::max(peak_, live_ += cost); }

  void RunBlock(BlockIndex block) {
    if (!begun_[block.u]) Add(costs_.c_o);
    begun_[block.u] = true;
    live_ -= q_.Use(block.u) * costs_.c_q + kv_.Use(block.v) * costs_.c_kv;
  }

  void EndComm(std::optional<Traffic> comm) {
    if (comm == Traffic::kQ) live_ -= q_.PassOnNext() * costs_.c_q;
    if (comm == Traffic::kKv) live_ -= kv_.PassOnNext() * costs_.c_kv;
    if (comm != Traffic::kO) return;
    const int arrived = (++o_sent_ + 1) % schedule_.tile.a;
    live_ -= costs_.c_o;                       // what was sent
    if (begun_[arrived]) live_ -= costs_.c_o;  // merged, else it becomes the row
    begun_[arrived] = true;
  }

  const Schedule& schedule_;
  const OverlapCosts costs_;
  ChunkLives q_;
  ChunkLives kv_;
  std::vector<bool> begun_;  // [a]: O#u has its buffer
  int o_sent_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

}  // namespace

int CommBlocks(std::optional<Traffic> comm, OverlapCosts costs) {
  if (comm == Traffic::kQ) return costs.c_q;
  if (comm == Traffic::kKv) return costs.c_kv;
  return comm == Traffic::kO ? costs.c_o : 0;
}

int64_t TimeInBlocks(const Schedule& schedule, OverlapCosts costs) {
  int64_t time = 0;
  for (const Step& step : schedule.steps) {
    time += std::max(int64_t{CommBlocks(step.comm, costs)}, static_cast<int64_t>(step.blocks.size()));
  }
  return time;
}

int64_t PeakChunkCost(const Schedule& schedule, OverlapCosts costs) {
  return MemoryWalk(schedule, costs).Run();
}

}  // namespace meshfill
