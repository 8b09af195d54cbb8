#include "engine/run/head_exchange.h"

#include <algorithm>
#include <utility>

#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

BufferRef HalfOf(const BufferRef& kv, int half) {
  const size_t bytes = kv->size_bytes() / 2;
  return PartOf(kv, half * bytes, bytes);
}

}  // namespace

HeadExchange::HeadExchange(const Plan& plan, const ModelShape& model, int rank, Stream& stream,
                           Communicator& communicator, absl::Duration wait_timeout, RankStats& stats,
                           TimelineRecorder* recorder)
    : model_(model),
      one_(model.HeadSlice(plan.heads)),
      heads_(plan.heads),
      member_(rank % plan.heads),
      first_rank_(rank - rank % plan.heads),
      slices_(plan.exchanges()),
      slice_tokens_(plan.exchange_tokens),
      q_{.members = plan.layout.Members(rank / plan.heads, plan.heads),
         .keys = false,
         .all_heads = model.q_heads,
         .heads = one_.q_heads},
      kv_{.members = plan.kv_layout().Members(rank / plan.heads, plan.heads),
          .keys = true,
          .all_heads = model.kv_heads,
          .heads = one_.kv_heads},
      stream_(stream),
      communicator_(communicator),
      wait_timeout_(wait_timeout),
      stats_(stats),
      recorder_(recorder) {}

absl::Status HeadExchange::StartToHeads(int slice, LayerChunks own) {
  if (slices_ == 1) {
    whole_ = std::move(own);
    return absl::OkStatus();
  }
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  ASSIGN_OR_RETURN(UnderWay q, StartTensor(q_, slice, own.q));
  to_heads_.push_back({.tensor = &q_, .slice = slice, .half = 0, .messages = std::move(q)});
  for (const int half : {0, 1}) {
    ASSIGN_OR_RETURN(UnderWay k_or_v, StartTensor(kv_, slice, HalfOf(own.kv, half)));
    to_heads_.push_back({.tensor = &kv_, .slice = slice, .half = half, .messages = std::move(k_or_v)});
  }
  return absl::OkStatus();
}

absl::Status HeadExchange::StartPrefix(const BufferRef& kv) {
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  for (const int half : {0, 1}) {
    ASSIGN_OR_RETURN(UnderWay k_or_v, StartTensor(kv_, kPrefix, HalfOf(kv, half)));
    to_heads_.push_back({.tensor = &kv_, .slice = kPrefix, .half = half, .messages = std::move(k_or_v)});
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerChunks> HeadExchange::FinishToHeads() {
  if (heads_ == 1) return std::exchange(whole_, {});
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  if (slices_ == 1) return ExchangeWhole(std::exchange(whole_, {}));
  LayerChunks chunks;
  ASSIGN_OR_RETURN(chunks.q, stream_.Allocate(one_.q_bytes(q_.members.tokens())));
  ASSIGN_OR_RETURN(chunks.kv, stream_.Allocate(one_.kv_bytes(kv_.members.tokens())));
  for (TensorUnderWay& each : std::exchange(to_heads_, {})) {
    void* const to = each.tensor == &q_ ? chunks.q->data() : HalfOf(chunks.kv, each.half)->data();
    RETURN_IF_ERROR(FinishTensor(*each.tensor, each.slice, std::move(each.messages), to));
  }
  return chunks;
}

// A tensor has its place, and its own memory is free, before the next one moves.
absl::StatusOr<LayerChunks> HeadExchange::ExchangeWhole(LayerChunks own) {
  const auto exchange = [this](const Tensor& tensor, BufferRef data, void* to) -> absl::Status {
    ASSIGN_OR_RETURN(UnderWay under_way, StartTensor(tensor, 0, data));
    data.reset();
    return FinishTensor(tensor, 0, std::move(under_way), to);
  };
  ASSIGN_OR_RETURN(BufferRef q, stream_.Allocate(one_.q_bytes(q_.members.tokens())));
  RETURN_IF_ERROR(exchange(q_, std::move(own.q), q->data()));
  BufferRef k = HalfOf(own.kv, 0), v = HalfOf(own.kv, 1);
  own.kv.reset();
  ASSIGN_OR_RETURN(BufferRef kv, stream_.Allocate(one_.kv_bytes(kv_.members.tokens())));
  RETURN_IF_ERROR(exchange(kv_, std::move(k), HalfOf(kv, 0)->data()));
  RETURN_IF_ERROR(exchange(kv_, std::move(v), HalfOf(kv, 1)->data()));
  return LayerChunks{.q = std::move(q), .kv = std::move(kv)};
}

absl::Status HeadExchange::StartToTokens(BufferRef mesh_output) {
  if (heads_ == 1) {
    output_ = std::move(mesh_output);
    return absl::OkStatus();
  }
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  for (int slice = 0; slice < slices_; ++slice) {
    const auto send = [&](int member) -> absl::StatusOr<BufferRef> {
      const SlotRange slots = Slots(q_, member, slice);
      ASSIGN_OR_RETURN(BufferRef message, stream_.Allocate(one_.q_bytes(slots.slots())));
      RETURN_IF_ERROR(CopyOut(q_, member, slots, mesh_output->data(), message->data()));
      return message;
    };
    const auto receive_bytes = [&](int) { return one_.q_bytes(OwnSlots(slice).slots()); };
    ASSIGN_OR_RETURN(UnderWay under_way, Start(send, receive_bytes));
    to_tokens_.push_back(std::move(under_way));
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerOutput> HeadExchange::FinishToTokens(int slice) {
  if (heads_ == 1) return LayerOutput{.parts = {std::move(output_)}, .dtype = DType::kF32};
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  LayerOutput output{.parts = std::vector<BufferRef>(heads_), .dtype = model_.dtype};
  RETURN_IF_ERROR(Finish(std::move(to_tokens_[slice]), [&](int member, BufferRef message) {
    output.parts[member] = std::move(message);
    return absl::OkStatus();
  }));
  if (slice == slices_ - 1) to_tokens_.clear();
  return output;
}

absl::StatusOr<HeadExchange::UnderWay> HeadExchange::StartTensor(const Tensor& tensor, int slice,
                                                                 const BufferRef& data) {
  const auto send = [&](int member) -> absl::StatusOr<BufferRef> {
    const int64_t first_head = int64_t{member} * tensor.all_heads / heads_;
    const int64_t tokens = Slots(tensor, member_, slice).slots();
    return PartOf(data, TensorBytes(first_head, tokens), TensorBytes(tensor.heads, tokens));
  };
  return Start(send,
               [&](int member) { return TensorBytes(tensor.heads, Slots(tensor, member, slice).slots()); });
}

absl::Status HeadExchange::FinishTensor(const Tensor& tensor, int slice, UnderWay under_way, void* to) {
  return Finish(std::move(under_way), [&](int member, BufferRef message) {
    return CopyIn(tensor, member, Slots(tensor, member, slice), message->data(), to);
  });
}

absl::StatusOr<HeadExchange::UnderWay> HeadExchange::Start(
    const std::function<absl::StatusOr<BufferRef>(int member)>& send,
    const std::function<int64_t(int member)>& receive_bytes) {
  UnderWay under_way;
  if (recorder_ != nullptr && recorder_->keeps_spans()) under_way.start = recorder_->Now();
  for (int step = 1; step < heads_; ++step) {
    const int to = (member_ + step) % heads_, from = (member_ + heads_ - step) % heads_;
    ASSIGN_OR_RETURN(BufferRef message, send(to));
    stats_.sent[Traffic::kAllToAll] += static_cast<int64_t>(message->size_bytes());
    ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> receive,
                     communicator_.SendReceive(Traffic::kAllToAll, first_rank_ + to, std::move(message),
                                               first_rank_ + from, static_cast<size_t>(receive_bytes(from))));
    under_way.pending.push_back(std::move(receive));
  }
  ASSIGN_OR_RETURN(under_way.own, send(member_));
  return under_way;
}

absl::Status HeadExchange::Finish(UnderWay under_way,
                                  const std::function<absl::Status(int member, BufferRef message)>& accept) {
  const char* const name = OperationName(Traffic::kAllToAll);
  RETURN_IF_ERROR(accept(member_, std::move(under_way.own)));
  for (int step = 1; step < heads_; ++step) {
    ASSIGN_OR_RETURN(BufferRef message, [&] {
      SpanTimer timer(&stats_.wait_seconds[Traffic::kAllToAll], recorder_,
                      {.kind = SpanKind::kWait, .what = name});
      return under_way.pending[step - 1]->Wait(MonotonicNow() + wait_timeout_);
    }());
    RETURN_IF_ERROR(accept((member_ + heads_ - step) % heads_, std::move(message)));
  }
  if (recorder_ == nullptr || !recorder_->keeps_spans()) return absl::OkStatus();
  // Where several are under way at once, each is shown from the end of the one before it.
  TimelineRecorder::Moment& start = under_way.start.host < last_end_.host ? last_end_ : under_way.start;
  TimelineRecorder::Moment end = recorder_->Now();
  recorder_->Record(Span{.kind = SpanKind::kTransfer, .what = name}, nullptr, std::move(start), end);
  last_end_ = std::move(end);
  return absl::OkStatus();
}

SlotRange HeadExchange::Slots(const Tensor& tensor, int member, int slice) const {
  const int64_t chunk = tensor.members.ChunkTokens(member);
  if (slices_ == 1) return {0, chunk};
  // Cached tokens are the first slots of a rank's keys (CanFollow, engine/plan/plan_shape.h).
  const int64_t cached = tensor.keys ? chunk - q_.members.ChunkTokens(member) : 0;
  if (slice == kPrefix) return {0, cached};
  return {std::min(chunk, cached + slice * slice_tokens_),
          std::min(chunk, cached + (slice + 1) * slice_tokens_)};
}

int64_t HeadExchange::TensorBytes(int64_t heads, int64_t tokens) const {
  return heads * tokens * model_.head_dim * static_cast<int64_t>(DTypeBytes(model_.dtype));
}

absl::Status HeadExchange::CopyIn(const Tensor& tensor, int member, SlotRange slots, const void* message,
                                  void* group) {
  SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "reorder"});
  for (const Rows& rows : RowsOf(tensor, member, slots, model_.dtype)) {
    RETURN_IF_ERROR(stream_.CopyHeads({.from = message,
                                       .from_rows = rows.message,
                                       .to = group,
                                       .to_rows = rows.group,
                                       .heads = tensor.heads,
                                       .tokens = rows.tokens,
                                       .head_dim = model_.head_dim}));
  }
  return absl::OkStatus();
}

absl::Status HeadExchange::CopyOut(const Tensor& tensor, int member, SlotRange slots, const void* group,
                                   void* message) {
  SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "reorder"});
  for (const Rows& rows : RowsOf(tensor, member, slots, DType::kF32)) {
    RETURN_IF_ERROR(stream_.CopyHeads({.from = group,
                                       .from_rows = rows.group,
                                       .to = message,
                                       .to_rows = rows.message,
                                       .heads = tensor.heads,
                                       .tokens = rows.tokens,
                                       .head_dim = model_.head_dim}));
  }
  return absl::OkStatus();
}

// The rest of the stripe that the slots begin in, then from the next one on: each is one SlotPositions.
std::vector<HeadExchange::Rows> HeadExchange::RowsOf(const Tensor& tensor, int member, SlotRange slots,
                                                     DType group_dtype) const {
  const SlotPositions chunk = tensor.members.Positions(member);
  const auto rows = [&](int64_t begin, int64_t tokens, const SlotPositions& positions) {
    return Rows{.group = {.dtype = group_dtype,
                          .head_stride = tensor.members.tokens() * model_.head_dim,
                          .slot_stride = model_.head_dim,
                          .slots = positions},
                .message = {.dtype = model_.dtype,
                            .head_stride = slots.slots() * model_.head_dim,
                            .slot_stride = model_.head_dim,
                            .slots = {.base = begin - slots.begin}},
                .tokens = tokens};
  };
  std::vector<Rows> all;
  const int64_t stripe = (slots.begin + chunk.width - 1) / chunk.width;  // the first that begins there
  const int64_t whole = std::min(slots.end, stripe * chunk.width);
  if (slots.begin < whole)
    all.push_back(rows(slots.begin, whole - slots.begin, {.base = chunk.At(slots.begin)}));
  if (whole < slots.end) {
    const SlotPositions from_stripe = {
        .base = chunk.base + chunk.stride * stripe, .stride = chunk.stride, .width = chunk.width};
    all.push_back(rows(whole, slots.end - whole, from_stripe));
  }
  return all;
}

}  // namespace meshfill
