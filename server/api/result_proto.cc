#include "server/api/result_proto.h"

#include "engine/mesh/placement_name.h"

namespace meshfill {

v1::Layout ToProto(LayoutKind layout) {
  switch (layout) {
    case LayoutKind::kStriped:
      return v1::LAYOUT_STRIPED;
    case LayoutKind::kZigzag:
      return v1::LAYOUT_ZIGZAG;
    case LayoutKind::kContiguous:
      return v1::LAYOUT_CONTIGUOUS;
  }
  return v1::LAYOUT_UNSPECIFIED;
}

v1::PlanSummary ToProto(const Plan& plan) {
  v1::PlanSummary summary;
  summary.set_ranks(static_cast<uint32_t>(plan.ranks()));
  summary.set_heads(static_cast<uint32_t>(plan.heads));
  summary.set_a(static_cast<uint32_t>(plan.tile.a));
  summary.set_b(static_cast<uint32_t>(plan.tile.b));
  summary.set_layout(ToProto(plan.layout.kind()));
  summary.set_stripe(static_cast<uint64_t>(plan.layout.stripe()));
  summary.set_partial_dtype(DTypeName(plan.partial_dtype));
  summary.set_placement(PlacementName(plan.placement.name));
  summary.set_exchange_tokens(static_cast<uint64_t>(plan.exchanges() == 1 ? 0 : plan.exchange_tokens));
  return summary;
}

v1::CommBytes ToProto(const CommBytes& bytes) {
  v1::CommBytes message;
  message.set_q(static_cast<uint64_t>(bytes[Traffic::kQ]));
  message.set_kv(static_cast<uint64_t>(bytes[Traffic::kKv]));
  message.set_o(static_cast<uint64_t>(bytes[Traffic::kO]));
  message.set_all_to_all(static_cast<uint64_t>(bytes[Traffic::kAllToAll]));
  message.set_gather(static_cast<uint64_t>(bytes[Traffic::kGather]));
  return message;
}

v1::PrefillResult ToProto(const PrefillResult& result, const std::string& request_id) {
  v1::PrefillResult message;
  message.set_request_id(request_id);
  message.set_tokens(static_cast<uint64_t>(result.tokens()));
  message.set_cached_tokens(static_cast<uint64_t>(result.cached_tokens));
  message.set_first_token(result.top.front().token);
  for (const TokenLogit& best : result.top) {
    v1::TokenLogit& entry = *message.add_top();
    entry.set_token(best.token);
    entry.set_logit(best.logit);
  }
  *message.mutable_plan() = ToProto(result.plan);
  message.mutable_plan()->set_pieces(static_cast<uint32_t>(result.pieces));
  message.mutable_plan()->set_piece_tokens(static_cast<uint64_t>(result.piece_tokens));
  v1::PrefillResult::Seconds& seconds = *message.mutable_seconds();
  seconds.set_prefill(result.lost_seconds + result.prefill_seconds);
  seconds.set_attention(result.attention_seconds);
  seconds.set_comm_wait(result.comm_wait_seconds);
  *message.mutable_comm_bytes() = ToProto(result.comm_bytes);
  message.set_mfu(result.mfu);
  message.set_attempts(static_cast<uint32_t>(result.attempts));
  return message;
}

v1::KvManifest ToProto(const KvPrompt& kept, const std::string& lease, absl::Duration expires_in) {
  const KvShape& shape = kept.shape();
  v1::KvManifest manifest;
  manifest.set_lease(lease);
  manifest.set_expires_in_seconds(absl::ToDoubleSeconds(expires_in));
  manifest.set_tokens(static_cast<uint64_t>(kept.tokens()));
  manifest.set_layers(static_cast<uint32_t>(shape.layers));
  manifest.set_kv_heads(static_cast<uint32_t>(shape.kv_heads));
  manifest.set_head_dim(static_cast<uint32_t>(shape.head_dim));
  manifest.set_dtype(DTypeName(shape.dtype));
  manifest.set_bytes(static_cast<uint64_t>(kept.bytes()));
  return manifest;
}

}  // namespace meshfill
