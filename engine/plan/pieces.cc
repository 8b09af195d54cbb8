#include "engine/plan/pieces.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Plans the pieces of one request.
class PiecePlanner {
 public:
  PiecePlanner(const ModelShape& model, const PoolSpeed& speed, const PlanRequest& request,
               int64_t granule_tokens)
      : model_(model), speed_(speed), request_(request), granule_tokens_(granule_tokens) {
    request_.layout = LayoutKind::kStriped;
    request_.keeps_kv |= request_.kv_on_host;  // for the pieces that follow
  }

  // The later a piece, the more keys it sees; the last two may differ from the others in length.
  bool Fits(int64_t piece_tokens) const {
    const std::vector<Range> pieces = Cut(piece_tokens);
    return std::all_of(pieces.end() - std::min<std::ptrdiff_t>(3, std::ssize(pieces)), pieces.end(),
                       [this](const Range& piece) { return Piece(piece).ok(); });
  }

  absl::StatusOr<PlanChoice> Plan(int64_t piece_tokens) const {
    std::vector<meshfill::Plan> plans;
    Prediction total;
    std::optional<PlanChoice> last;
    for (const Range& range : Cut(piece_tokens)) {
      ASSIGN_OR_RETURN(last, Piece(range));
      const Prediction& predicted = last->plan.predicted;
      total.seconds += predicted.seconds;
      total.compute_seconds += predicted.compute_seconds;
      total.comm_wait_seconds += predicted.comm_wait_seconds;
      total.comm_bytes += predicted.comm_bytes;
      total.peak_bytes = std::max(total.peak_bytes, predicted.peak_bytes);
      total.run_bytes = std::max(total.run_bytes, predicted.run_bytes);
      total.weight_bytes = predicted.weight_bytes;
      total.weight_seconds += predicted.weight_seconds;
      total.parts += predicted.parts;
      plans.push_back(last->plan);
    }
    last->plan.predicted = total;
    last->pieces = std::move(plans);
    return *std::move(last);
  }

 private:
  struct Range {
    int64_t first = 0;
    int64_t tokens = 0;
  };

  // Pieces of that many tokens, and one of the rest. Where the rest is less than a stripe, which would then
  // be a shorter one, the last but one gives it a granule.
  std::vector<Range> Cut(int64_t piece_tokens) const {
    std::vector<Range> pieces;
    for (int64_t first = 0; first < request_.tokens; first += piece_tokens) {
      pieces.push_back({first, std::min(piece_tokens, request_.tokens - first)});
    }
    if (pieces.size() == 1 || pieces.back().tokens >= request_.stripe) return pieces;
    Range& last = pieces.back();
    Range& before = pieces[pieces.size() - 2];
    last.first -= granule_tokens_;
    last.tokens += granule_tokens_;
    before.tokens -= granule_tokens_;
    if (before.tokens == 0) pieces.erase(pieces.end() - 2);
    return pieces;
  }

  absl::StatusOr<PlanChoice> Piece(const Range& range) const {
    PlanRequest piece = request_;
    piece.tokens = range.tokens;
    piece.cached_tokens += range.first;
    if (range.first + range.tokens < request_.tokens) piece.weights = piece.weights.WithoutHead();
    return MakePlan(model_, speed_, piece);
  }

  const ModelShape& model_;
  const PoolSpeed& speed_;
  PlanRequest request_;
  const int64_t granule_tokens_;
};

}  // namespace

int64_t RoundTokens(int ranks, int64_t stripe) {
  return ranks * std::clamp<int64_t>(stripe, 1, int64_t{1} << 31);
}

absl::StatusOr<PlanChoice> MakePlanInPieces(const ModelShape& model, const PoolSpeed& speed,
                                            const PlanRequest& request, int64_t granule_tokens) {
  absl::StatusOr<PlanChoice> whole = MakePlan(model, speed, request);
  const bool follows = request.layout.value_or(LayoutKind::kStriped) == LayoutKind::kStriped;
  if (!absl::IsFailedPrecondition(whole.status()) || !follows) return whole;
  const PiecePlanner planner(model, speed, request, granule_tokens);
  // In granules: what fits, and what is too long, or the whole prompt.
  int64_t fits = (request.tokens + kMostPieces * granule_tokens - 1) / (kMostPieces * granule_tokens);
  int64_t too_long = (request.tokens + granule_tokens - 1) / granule_tokens;
  if (fits >= too_long || !planner.Fits(fits * granule_tokens)) {
    return absl::FailedPreconditionError(
        absl::StrCat(whole.status().message(), "; nor do pieces of ", fits * granule_tokens, " tokens fit"));
  }
  while (too_long - fits > 1) {
    const int64_t middle = fits + (too_long - fits) / 2;
    (planner.Fits(middle * granule_tokens) ? fits : too_long) = middle;
  }
  return planner.Plan(fits * granule_tokens);
}

absl::Status CheckKvOfPieces(const ModelShape& model, const PlanRequest& request, const PlanChoice& choice,
                             int64_t kv_budget_bytes) {
  const int64_t tokens = request.cached_tokens + request.tokens;
  const int64_t kept_bytes = model.layers * model.kv_bytes(tokens);
  if (choice.pieces.empty() || kept_bytes <= kv_budget_bytes) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "a prompt of ", tokens, " tokens does not fit the memory budget of ", request.memory_budget_bytes,
      " bytes whole, and in pieces its K and V take ", kept_bytes, " bytes, more than the ", kv_budget_bytes,
      " for them: send a shorter prompt, or raise kv.memory_bytes (behind GPUs kv.host_memory_bytes)"));
}

}  // namespace meshfill
