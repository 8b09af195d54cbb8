#include "server/api/result_proto.h"

#include <sys/mman.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "engine/mesh/placement_name.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/slice.h"

namespace meshfill {
namespace {

constexpr size_t kPagesOfItsOwn = 256 << 10;  // bytes of a message

}  // namespace

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
  summary.set_kv_inner(static_cast<uint32_t>(plan.kv_inner));
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
  message.set_pack_prompts(static_cast<uint32_t>(result.pack_prompts));
  return message;
}

grpc::ByteBuffer ResultEvent(const v1::PrefillResult& result, std::span<const float> logits) {
  static_assert(std::endian::native == std::endian::little, "floats travel as they lie in memory");
  using google::protobuf::internal::WireFormatLite;
  using google::protobuf::io::CodedOutputStream;
  const auto tag_of = [](int field) {
    return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  };
  const auto head_bytes = [](uint32_t tag, size_t bytes) {
    return CodedOutputStream::VarintSize32(tag) + CodedOutputStream::VarintSize64(bytes);
  };
  const uint32_t event_tag = tag_of(v1::PrefillEvent::kResultFieldNumber);
  const uint32_t logits_tag = tag_of(v1::PrefillResult::kLogitsFieldNumber);
  const size_t of_logits = logits.size_bytes();
  const size_t of_result =
      result.ByteSizeLong() + (of_logits == 0 ? 0 : head_bytes(logits_tag, of_logits) + of_logits);
  const size_t size = head_bytes(event_tag, of_result) + of_result;

  void* const pages = size < kPagesOfItsOwn
                          ? MAP_FAILED
                          : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const grpc::Slice slice = pages == MAP_FAILED
                                ? grpc::Slice(grpc_slice_malloc(size), grpc::Slice::STEAL_REF)
                                : grpc::Slice(pages, size, [](void* at, size_t bytes) { munmap(at, bytes); });
  auto* to = const_cast<uint8_t*>(slice.begin());  // nobody else has it yet
  to = CodedOutputStream::WriteVarint32ToArray(event_tag, to);
  to = CodedOutputStream::WriteVarint64ToArray(of_result, to);
  to = result.SerializeWithCachedSizesToArray(to);
  if (of_logits > 0) {
    to = CodedOutputStream::WriteVarint32ToArray(logits_tag, to);
    to = CodedOutputStream::WriteVarint64ToArray(of_logits, to);
    std::memcpy(to, logits.data(), of_logits);
  }
  return {&slice, 1};
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
