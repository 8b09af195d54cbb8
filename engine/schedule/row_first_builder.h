// Fills an order of communications with blocks: row-first, so that a row that must be sent is whole in time.
//
// Given the order alone, no other choice of blocks takes less time. A step costs max(communication, blocks),
// so blocks beyond a communication's cost gain nothing over a step of their own after it: a schedule's time
// is that of its communications plus the blocks that none of them hides. A block may run from the step after
// its chunks arrived up to the Send O of its row, and Send O go by rising row: row-first, row 0 last, is
// earliest deadline first, which hides as many blocks as any rule can (a greatest matching of intervals with
// slots). What is left of a row when its Send O is due runs before it, hidden by nothing.
#ifndef MESHFILL_ENGINE_SCHEDULE_ROW_FIRST_BUILDER_H_
#define MESHFILL_ENGINE_SCHEDULE_ROW_FIRST_BUILDER_H_

#include <cstdint>
#include <vector>

#include "engine/schedule/schedule.h"

namespace meshfill {

class RowFirstBuilder {
 public:
  RowFirstBuilder(Tile tile, OverlapCosts costs);

  int q_chunks() const { return q_chunks_; }    // Q#0 … that have arrived, the rank's own among them
  int kv_chunks() const { return kv_chunks_; }  // KV#0 … that have arrived, the rank's own among them
  int o_sent() const { return o_sent_; }
  bool IsWhole(int row) const { return computed_[row] == schedule_.tile.b; }

  // The next communication, with as many ready blocks as it hides. A Send O comes after all KV and the row's
  // Q; if its row is not whole, a step that makes it so goes before.
  void Append(Traffic comm);

  // Call after the last communication: computes what is left of row 0.
  Schedule Finish() &&;

 private:
  void AppendStep(std::optional<Traffic> comm, int64_t max_blocks);
  void TakeRow(int row, int64_t max_blocks, Step& step);

  const OverlapCosts costs_;
  Schedule schedule_;
  int q_chunks_ = 1;
  int kv_chunks_ = 1;
  int o_sent_ = 0;
  int first_ready_ = 1;        // rows 1 … first_ready_ − 1 have no ready block
  std::vector<int> computed_;  // [a]: blocks, by rising v
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_SCHEDULE_ROW_FIRST_BUILDER_H_
