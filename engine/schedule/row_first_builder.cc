#include "engine/schedule/row_first_builder.h"

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
  kv_chunks_ += comm == Traffic::kKv ? 1 : 0;
  o_sent_ += comm == Traffic::kO ? 1 : 0;
}

Schedule RowFirstBuilder::Finish() && {
  if (!IsWhole(0)) AppendStep(std::nullopt, schedule_.tile.b - computed_[0]);
  return std::move(schedule_);
}

void RowFirstBuilder::AppendStep(std::optional<Traffic> comm, int64_t max_blocks) {
  Step step{.comm = comm, .blocks = {}};
  while (first_row_ < q_chunks_ && IsWhole(first_row_)) ++first_row_;
  for (int row = first_row_; row < q_chunks_; ++row) TakeRow(row, max_blocks, step);
  TakeRow(0, max_blocks, step);
  schedule_.steps.push_back(std::move(step));
}

void RowFirstBuilder::TakeRow(int row, int64_t max_blocks, Step& step) {
  while (static_cast<int64_t>(step.blocks.size()) < max_blocks && computed_[row] < kv_chunks_) {
    step.blocks.push_back({.u = row, .v = computed_[row]++});
  }
}

}  // namespace meshfill
