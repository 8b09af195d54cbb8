#include "server/api/plan_proto.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/mesh/placement_name.h"
#include "engine/prefill_request.h"
#include "server/api/result_proto.h"

namespace meshfill {
namespace {

v1::PlanReply::Prediction ToProto(const Prediction& prediction) {
  v1::PlanReply::Prediction message;
  message.set_seconds(prediction.seconds);
  message.set_compute_seconds(prediction.compute_seconds);
  message.set_comm_wait_seconds(prediction.comm_wait_seconds);
  *message.mutable_comm_bytes() = ToProto(prediction.comm_bytes);
  message.set_peak_bytes(prediction.peak_bytes);
  message.set_weight_bytes(prediction.weight_bytes);
  message.set_weight_seconds(prediction.weight_seconds);
  return message;
}

}  // namespace

absl::StatusOr<int64_t> ToTokenCount(uint64_t tokens, const PrefillEngine& engine) {
  if (tokens > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return PromptTooLong(engine.model(), engine.model_name(), tokens);
  }
  return static_cast<int64_t>(tokens);
}

absl::StatusOr<PrefillOptions> ToPrefillOptions(const v1::PlanOptions& options) {
  constexpr uint32_t kMost = std::numeric_limits<int16_t>::max();  // far above any pool
  PrefillOptions result;
  if (options.has_tile()) {
    const uint32_t a = options.tile().a(), b = options.tile().b();
    if (a == 0 || b == 0 || a > kMost || b > kMost) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan.tile is ", a, "x", b, "; a and b must be between 1 and the pool's ranks"));
    }
    result.tile = Tile{static_cast<int>(a), static_cast<int>(b)};
  }
  if (options.heads() > kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan.heads is ", options.heads(), "; it must not be above the pool's ranks"));
  }
  if (options.heads() != 0) result.heads = static_cast<int>(options.heads());
  if (options.stripe() != 0) result.stripe = options.stripe();
  switch (options.layout()) {
    case v1::LAYOUT_UNSPECIFIED:
      break;
    case v1::LAYOUT_STRIPED:
      result.layout = LayoutKind::kStriped;
      break;
    case v1::LAYOUT_ZIGZAG:
      result.layout = LayoutKind::kZigzag;
      break;
    case v1::LAYOUT_CONTIGUOUS:
      result.layout = LayoutKind::kContiguous;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("plan.layout is ", static_cast<int>(options.layout()),
                       ", which is no layout; use striped, zigzag or contiguous"));
  }
  return result;
}

v1::PlanOptions PlanOptionsOf(const PrefillOptions& options) {
  v1::PlanOptions message;
  if (options.tile.has_value()) {
    message.mutable_tile()->set_a(static_cast<uint32_t>(options.tile->a));
    message.mutable_tile()->set_b(static_cast<uint32_t>(options.tile->b));
  }
  if (options.heads.has_value()) message.set_heads(static_cast<uint32_t>(*options.heads));
  if (options.layout.has_value()) message.set_layout(ToProto(*options.layout));
  if (options.stripe.has_value()) message.set_stripe(static_cast<uint32_t>(*options.stripe));
  return message;
}

v1::PlanSummary SummaryOf(const PlanChoice& choice) {
  v1::PlanSummary summary = ToProto(choice.plan);
  summary.set_pieces(static_cast<uint32_t>(std::max<size_t>(1, choice.pieces.size())));
  if (!choice.pieces.empty()) {
    summary.set_piece_tokens(static_cast<uint64_t>(choice.pieces.front().layout.tokens()));
  }
  return summary;
}

v1::PlanReply ToProto(const PlanChoice& choice) {
  v1::PlanReply message;
  *message.mutable_plan() = SummaryOf(choice);
  for (const Step& step : choice.plan.schedule.steps) {
    auto& step_message = *message.add_steps();
    step_message.set_comm(CommName(step.comm));
    if (step.spans > 1) step_message.set_spans(static_cast<uint32_t>(step.spans));
    for (const BlockIndex& block : step.blocks) {
      auto& block_message = *step_message.add_blocks();
      block_message.set_u(block.u);
      block_message.set_v(block.v);
    }
  }
  message.set_weights(WeightModeName(choice.weights.mode));
  *message.mutable_predicted() = ToProto(choice.plan.predicted);
  for (const PlanCandidate& candidate : choice.candidates) {
    auto& candidate_message = *message.add_candidates();
    candidate_message.set_a(candidate.tile.a);
    candidate_message.set_b(candidate.tile.b);
    candidate_message.set_heads(candidate.heads);
    *candidate_message.mutable_predicted() = ToProto(candidate.predicted);
    candidate_message.set_ranks(candidate.ranks());
    candidate_message.set_layout(ToProto(candidate.layout.kind()));
    candidate_message.set_partial_dtype(DTypeName(candidate.partial_dtype));
    candidate_message.set_placement(PlacementName(candidate.placement));
  }
  return message;
}

}  // namespace meshfill
