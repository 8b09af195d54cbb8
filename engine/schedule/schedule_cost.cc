#include "engine/schedule/schedule_cost.h"

#include <algorithm>

#include "engine/schedule/schedule_walk.h"

namespace meshfill {
namespace {

class MemoryWalk : public ScheduleVisitor {
 public:
  explicit MemoryWalk(OverlapCosts costs) : costs_(costs) { Add(costs_.c_q + costs_.c_kv); }

  int64_t peak() const { return peak_; }

  void Start(const Transfer& transfer) { Add(CommBlocks(transfer.traffic, costs_)); }
  void Block(BlockIndex, RowState row) {
    if (row == RowState::kEmpty) Add(costs_.c_o);
  }
  void End(const Transfer& transfer, RowState row) {
    if (transfer.traffic != Traffic::kO) return;
    live_ -= costs_.c_o;                               // what was sent
    if (row != RowState::kEmpty) live_ -= costs_.c_o;  // merged, else it becomes the row
  }
  void FreeQ(int) { live_ -= costs_.c_q; }
  void FreeKv(int) { live_ -= costs_.c_kv; }

 private:
  void Add(int64_t cost) { peak_ = std::max(peak_, live_ += cost); }

  const OverlapCosts costs_;
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
  MemoryWalk walk(costs);
  Walk(schedule, walk);
  return walk.peak();
}

}  // namespace meshfill
