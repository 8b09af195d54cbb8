#include "engine/schedule/row_first_builder.h"

#include <algorithm>
#include <utility>

#include "engine/schedule/schedule_cost.h"

namespace meshfill {

RowFirstBuilder::RowFirstBuilder(Tile tile, OverlapCosts costs) : costs_(costs), computed_(tile.a, 0) {
  schedule_.tile = tile;
}

void RowFirstBuilder::Append(Traffic comm) {
  if (comm == Traffic::kO && !IsWhole(o_sent_ + 1)) {
    AppendStep(std::nullopt, schedule_.tile.b - computed_[o_sent_ + 1]);
  }
  AppendStep(comm, CommBlocks(comm, costs_));
  q_chunks_ += comm == Traffic::kQ ? 1 : 0;
  if (comm == Traffic::kKv) {
    ++kv_chunks_;
    first_ready_ = 1;
  }
  o_sent_ += comm == Traffic::kO ? 1 : 0;
}

Schedule RowFirstBuilder::Finish() && {
  if (!IsWhole(0)) AppendStep(std::nullopt, schedule_.tile.b - computed_[0]);
  return std::move(schedule_);
}

void RowFirstBuilder::AppendStep(std::optional<Traffic> comm, int64_t max_blocks) {
  Step step{.comm = comm, .blocks = {}};
  for (; first_ready_ < q_chunks_; ++first_ready_) {
    TakeRow(first_ready_, max_blocks, step);
    if (computed_[first_ready_] < kv_chunks_) break;  // the step is full
  }
  TakeRow(0, max_blocks, step);
  schedule_.steps.push_back(std::move(step));
}

void RowFirstBuilder::TakeRow(int row, int64_t max_blocks, Step& step) {
  const auto taken = static_cast<int64_t>(step.blocks.size());
  const int end = static_cast<int>(std::min<int64_t>(kv_chunks_, computed_[row] + max_blocks - taken));
  if (end <= computed_[row]) return;
  if (taken == 0) step.blocks.reserve(end - computed_[row]);  // further rows: as a vector grows
  while (computed_[row] < end) step.blocks.push_back({.u = row, .v = computed_[row]++});
}

}  // namespace meshfill
