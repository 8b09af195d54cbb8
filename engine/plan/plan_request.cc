#include "engine/plan/plan_request.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

absl::Status CheckModel(const ModelShape& model) {
  if (model.layers < 1 || model.q_heads < 1 || model.kv_heads < 1 || model.head_dim < 1 ||
      model.q_heads % model.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot plan for a model of ", model.layers, " layers, ",
                                                   model.q_heads, " query heads, ", model.kv_heads,
                                                   " KV heads of ", model.head_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const ModelShape& model, const PlanRequest& request) {
  const int heads = request.heads.value_or(1);
  const std::vector<int> possible = HeadGroupCounts(model, request.ranks);
  if (std::find(possible.begin(), possible.end(), heads) == possible.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        heads, " head groups of ", request.ranks, " ranks cannot share ", model.q_heads, " query heads and ",
        model.kv_heads, " KV heads; possible numbers of head groups: ", absl::StrJoin(possible, ", ")));
  }
  if (!request.tile.has_value()) return absl::OkStatus();
  const auto [a, b] = *request.tile;
  if (a >= 1 && b >= 1 && int64_t{a} * b * heads == request.ranks) return absl::OkStatus();
  const std::string groups = heads == 1 ? "" : absl::StrCat(" with ", heads, " head groups");
  return absl::InvalidArgumentError(absl::StrCat("tile ", request.tile->DebugString(), groups,
                                                 " does not multiply to the ", request.ranks,
                                                 " ranks of the pool; give one that does, as 1x",
                                                 request.ranks / heads, ", or a pool of as many ranks"));
}

}  // namespace

std::vector<int> HeadGroupCounts(const ModelShape& model, int ranks) {
  std::vector<int> counts;
  for (int h = 1; h <= std::min(ranks, model.q_heads); ++h) {
    if (ranks % h == 0 && model.CanSplitHeads(h)) counts.push_back(h);
  }
  return counts;
}

absl::Status CheckPlanRequest(const ModelShape& model, const PlanRequest& request) {
  RETURN_IF_ERROR(CheckModel(model));
  RETURN_IF_ERROR(CheckShape(model, request));
  if (request.partial_dtype.value_or(DType::kF32) != DType::kF32 && request.partial_dtype != DType::kBf16) {
    return absl::InvalidArgumentError(absl::StrCat("partial outputs cannot travel in ",
                                                   DTypeName(*request.partial_dtype), ": use f32 or bf16"));
  }
  if (!request.topology.node_of_seat.empty()) {
    RETURN_IF_ERROR(CheckTopology(request.topology));
    if (std::ssize(request.topology.node_of_seat) < request.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("a topology of ", request.topology.node_of_seat.size(),
                                                     " seats for ", request.ranks,
                                                     " ranks: give one for each"));
    }
  }
  constexpr int64_t kTooMany = int64_t{1} << 31;
  if (request.cached_tokens < 0 || request.cached_tokens >= kTooMany ||
      request.tokens >= kTooMany - request.cached_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(request.cached_tokens, " cached tokens before ",
                                                   request.tokens, ": use 0 or more, below 2^31 together"));
  }
  if (request.memory_budget_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory budget of ", request.memory_budget_bytes, " bytes: use 0 for no limit"));
  }
  return absl::OkStatus();
}

}  // namespace meshfill
