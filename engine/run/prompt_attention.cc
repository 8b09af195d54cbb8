#include "engine/run/prompt_attention.h"

#include <cstddef>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/rope.h"
#include "kernels/return_if_error.h"

namespace meshfill {

PromptAttention::PromptAttention(const RankPrompt& prompt, const ModelConfig& config, int rank,
                                 Stream& stream, Communicator& communicator, absl::Duration wait_timeout,
                                 RankStats& stats, TimelineRecorder* recorder)
    : prompt_(prompt),
      config_(config),
      shape_(config.shape),
      rank_(rank),
      stream_(stream),
      recorder_(recorder),
      chunk_tokens_(prompt.plan.layout.ChunkTokens(rank)),
      prefix_slots_(prompt.plan.kv_layout().ChunkTokens(rank) - chunk_tokens_),
      exchange_(prompt.plan, shape_, rank, stream, communicator, wait_timeout, stats, recorder),
      executor_(prompt.plan, shape_, rank, stream, communicator, wait_timeout, stats, recorder) {}

absl::Status PromptAttention::Check() const {
  const int64_t cached_tokens = prompt_.plan.cached_tokens;
  if (!CanFollow(prompt_.plan.layout, cached_tokens)) {
    return absl::InternalError(absl::StrCat("rank ", rank_, ": ", prompt_.plan.layout.DebugString(),
                                            " cannot follow ", cached_tokens, " cached tokens"));
  }
  if (cached_tokens != (prompt_.prefix == nullptr ? 0 : prompt_.prefix->tokens())) {
    return absl::InternalError(absl::StrCat("rank ", rank_, ": the plan has ", cached_tokens,
                                            " cached tokens, the prefix ",
                                            prompt_.prefix == nullptr ? 0 : prompt_.prefix->tokens()));
  }
  if (std::ssize(prompt_.ids) == chunk_tokens_) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("rank ", rank_, ": ", prompt_.ids.size(), " token ids for a chunk of ", chunk_tokens_));
}

absl::Status PromptAttention::Prepare(const BufferRef& staging, int64_t staging_tokens) {
  if (prompt_.prefix != nullptr) {
    prefix_.emplace(*prompt_.prefix, shape_, prompt_.plan.kv_layout(), rank_, prefix_slots_, stream_, staging,
                    staging_tokens);
  }
  for (const LayerForm& form : config_.layers) {
    RopeTables& tables = ropes_[form.rope];
    if (tables.cos == nullptr) {
      ASSIGN_OR_RETURN(tables, PlaceRopeTables(config_.RopeOf(form.rope)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BufferRef> PromptAttention::Elements(int64_t count, DType dtype) {
  return stream_.Allocate(static_cast<size_t>(count) * DTypeBytes(dtype));
}

absl::StatusOr<PromptAttention::RopeTables> PromptAttention::PlaceRopeTables(const RopeConfig& rope) {
  const Plan& plan = prompt_.plan;
  const size_t elements = static_cast<size_t>(chunk_tokens_ * shape_.rotated_dim() / 2);
  RopeTables tables;
  tables.host.reset(new (std::nothrow) float[2 * elements]);
  if (tables.host == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("rank ", rank_, ": no memory for the ",
                                                     2 * elements * sizeof(float),
                                                     " bytes of its rotary tables; send shorter prompts"));
  }
  const int64_t prompt_tokens = plan.cached_tokens + plan.layout.tokens() + prompt_.tokens_ahead;
  FillRopeTables(rope, shape_.rotated_dim(), prompt_tokens, plan.cached_tokens, plan.layout.Positions(rank_),
                 chunk_tokens_, tables.host.get(), tables.host.get() + elements,
                 stream_.device().grain().host_threads);
  ASSIGN_OR_RETURN(BufferRef placed, stream_.Place(tables.host.get(), 2 * elements * sizeof(float)));
  tables.cos = PartOf(placed, 0, elements * sizeof(float));
  tables.sin = PartOf(placed, elements * sizeof(float), elements * sizeof(float));
  return tables;
}

absl::StatusOr<LayerChunks> PromptAttention::NewChunks(const SlotRange& slots) {
  LayerChunks chunks;
  ASSIGN_OR_RETURN(chunks.q, Elements(shape_.q_elements(slots.slots()), shape_.dtype));
  ASSIGN_OR_RETURN(chunks.kv, Elements(shape_.kv_elements(slots.slots()), shape_.dtype));
  return chunks;
}

Layer::Heads PromptAttention::HeadsOf(const LayerChunks& chunks, const SlotRange& slots,
                                      LayerRope rope) const {
  const RopeTables& tables = ropes_.at(rope);
  const int64_t first_angle = slots.begin * shape_.rotated_dim() / 2;
  return {.tokens = slots.slots(),
          .rope_cos = tables.cos->data<float>() + first_angle,
          .rope_sin = tables.sin->data<float>() + first_angle,
          .q = chunks.q->data(),
          .k = HalfOf(chunks.kv, 0),
          .v = HalfOf(chunks.kv, 1)};
}

absl::Status PromptAttention::Begin(int layer, int slice, LayerChunks chunks) {
  if (prompt_.kv != nullptr) {
    RETURN_IF_ERROR(KeepKv(chunks.kv, OwnSlots(slice)));
    if (slice == slices() - 1) {
      RETURN_IF_ERROR(BeginKeeping(layer));
    }
  }
  if (prefix_.has_value() && slices() == 1) {
    ASSIGN_OR_RETURN(chunks.kv, BehindPrefix(std::move(chunks.kv), layer));
  }
  return exchange_.StartToHeads(slice, std::move(chunks));
}

absl::Status PromptAttention::Attend(int64_t window, const float* sinks) {
  ASSIGN_OR_RETURN(LayerChunks chunks, exchange_.FinishToHeads());
  ASSIGN_OR_RETURN(BufferRef output, executor_.Run(std::move(chunks), window, sinks));
  return exchange_.StartToTokens(std::move(output));
}

absl::Status PromptAttention::CopyHalf(int half, const BufferRef& from, int64_t tokens, const BufferRef& to,
                                       int64_t to_slots, int64_t slot) {
  return stream_.CopyHeads({.from = HalfOf(from, half),
                            .from_rows = HeadsOutermost(shape_, tokens),
                            .to = HalfOf(to, half),
                            .to_rows = HeadsOutermost(shape_, to_slots, slot),
                            .heads = shape_.kv_heads,
                            .tokens = tokens,
                            .head_dim = shape_.head_dim});
}

absl::StatusOr<BufferRef> PromptAttention::BehindPrefix(BufferRef own, int layer) {
  SpanTimer timer(nullptr, recorder_, {.what = "read prefix"});
  const int64_t slots = prefix_slots_ + chunk_tokens_;
  ASSIGN_OR_RETURN(BufferRef all, Elements(shape_.kv_elements(slots), shape_.dtype));
  for (int half = 0; half < 2; ++half) {
    RETURN_IF_ERROR(CopyHalf(half, own, chunk_tokens_, all, slots, prefix_slots_));
  }
  RETURN_IF_ERROR(prefix_->Read(layer, all, slots));
  return all;
}

absl::Status PromptAttention::SendPrefix(int layer) {
  if (!prefix_.has_value() || slices() == 1) return absl::OkStatus();
  ASSIGN_OR_RETURN(BufferRef prefix, Elements(shape_.kv_elements(prefix_slots_), shape_.dtype));
  {
    SpanTimer timer(nullptr, recorder_, {.what = "read prefix"});
    RETURN_IF_ERROR(prefix_->Read(layer, prefix, prefix_slots_));
  }
  return exchange_.StartPrefix(prefix);
}

absl::Status PromptAttention::KeepKv(const BufferRef& kv, const SlotRange& slots) {
  if (slots.slots() == chunk_tokens_) {
    kept_ = kv;
    return absl::OkStatus();
  }
  SpanTimer timer(nullptr, recorder_, {.what = "keep kv"});
  if (slots.begin == 0) {
    ASSIGN_OR_RETURN(kept_, Elements(shape_.kv_elements(chunk_tokens_), shape_.dtype));
  }
  for (int half = 0; half < 2; ++half) {
    RETURN_IF_ERROR(CopyHalf(half, kv, slots.slots(), kept_, chunk_tokens_, slots.begin));
  }
  return absl::OkStatus();
}

absl::Status PromptAttention::BeginKeeping(int layer) {
  SpanTimer timer(nullptr, recorder_, {.what = "keep kv"});
  ASSIGN_OR_RETURN(keeping_, prompt_.kv->Keep(rank_, layer, std::exchange(kept_, nullptr), stream_));
  return absl::OkStatus();
}

absl::Status PromptAttention::EndKeeping() {
  const std::unique_ptr<KvKeeping> keeping = std::move(keeping_);
  return keeping == nullptr ? absl::OkStatus() : keeping->Finish();
}

}  // namespace meshfill
