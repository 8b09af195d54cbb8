#include "server/pool/prompt_pieces.h"

#include <algorithm>
#include <utility>

namespace meshfill {

PromptPieces::PromptPieces(PlanChoice choice, std::vector<Connection> workers)
    : pieces_(std::move(choice.pieces)),
      predicted_(choice.plan.predicted),
      workers_(std::move(workers)),
      shares_weights_(choice.weights.mode == WeightMode::kSharded),
      so_far_{.plan = pieces_.front(), .logits = {}, .ranks = {}} {}

Plan PromptPieces::plan() const {
  Plan plan = pieces_[done_];
  plan.predicted.run_bytes = predicted_.run_bytes;
  return plan;
}

int64_t PromptPieces::tokens_ahead() const {
  int64_t tokens = 0;
  for (int piece = done_ + 1; piece < count(); ++piece) tokens += pieces_[piece].layout.tokens();
  return tokens;
}

bool PromptPieces::Has(Connection worker) const {
  return std::find(workers_.begin(), workers_.end(), worker) != workers_.end();
}

void PromptPieces::OnDone(RunResult result, KvSlabs kept) {
  so_far_.ranks.resize(result.ranks.size());
  for (size_t rank = 0; rank < result.ranks.size(); ++rank) so_far_.ranks[rank] += result.ranks[rank];
  so_far_.seconds += result.seconds;
  so_far_.probed |= result.probed;
  for (Plan& piece : pieces_) piece.placement = result.plan.placement;
  before_ = std::move(kept);
  ++done_;
}

RunResult PromptPieces::Finish(RunResult last) const {
  for (size_t rank = 0; rank < last.ranks.size(); ++rank) last.ranks[rank] += so_far_.ranks[rank];
  last.seconds += so_far_.seconds;
  last.probed |= so_far_.probed;
  last.plan.predicted = predicted_;
  last.pieces = count();
  last.piece_tokens = pieces_.front().layout.tokens();
  last.cached_tokens = pieces_.front().cached_tokens;
  return last;
}

}  // namespace meshfill
