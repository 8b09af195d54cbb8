#include "engine/run/head_exchange.h"

#include <memory>
#include <utility>

#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {

HeadExchange::HeadExchange(const Plan& plan, const ModelShape& model, int rank, Stream& stream,
                           Communicator& communicator, absl::Duration wait_timeout, RankStats& stats,
                           TimelineRecorder* recorder)
    : model_(model),
      slice_(model.HeadSlice(plan.heads)),
      heads_(plan.heads),
      member_(rank % plan.heads),
      first_rank_(rank - rank % plan.heads),
      q_members_(plan.layout.Members(rank / plan.heads, plan.heads)),
      kv_members_(plan.kv_layout().Members(rank / plan.heads, plan.heads)),
      stream_(stream),
      communicator_(communicator),
      wait_timeout_(wait_timeout),
      stats_(stats),
      recorder_(recorder) {}

absl::StatusOr<LayerChunks> HeadExchange::ToHeads(LayerChunks own) {
  if (heads_ == 1) return own;
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  ASSIGN_OR_RETURN(BufferRef q, stream_.Allocate(slice_.q_bytes(q_members_.tokens())));
  RETURN_IF_ERROR(TensorToHeads(std::move(own.q), q_members_, model_.q_heads, slice_.q_heads, q->data()));

  const size_t own_half = own.kv->size_bytes() / 2;
  const BufferRef k = PartOf(own.kv, 0, own_half), v = PartOf(own.kv, own_half, own_half);
  own.kv.reset();
  ASSIGN_OR_RETURN(BufferRef kv, stream_.Allocate(slice_.kv_bytes(kv_members_.tokens())));
  auto* const halves = kv->data<std::byte>();
  RETURN_IF_ERROR(TensorToHeads(k, kv_members_, model_.kv_heads, slice_.kv_heads, halves));
  RETURN_IF_ERROR(
      TensorToHeads(v, kv_members_, model_.kv_heads, slice_.kv_heads, halves + kv->size_bytes() / 2));
  return LayerChunks{.q = std::move(q), .kv = std::move(kv)};
}

absl::StatusOr<LayerOutput> HeadExchange::ToTokens(BufferRef mesh_output) {
  if (heads_ == 1) return LayerOutput{.parts = {std::move(mesh_output)}, .dtype = DType::kF32};
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  LayerOutput output{.parts = std::vector<BufferRef>(heads_), .dtype = model_.dtype};
  const absl::Status status = AllToAll({
      .send = [&](int member) -> absl::StatusOr<BufferRef> {
        const int64_t tokens = q_members_.ChunkTokens(member);
        ASSIGN_OR_RETURN(BufferRef message, stream_.Allocate(slice_.q_bytes(tokens)));
        RETURN_IF_ERROR(Copy({.from = mesh_output->data(),
                              .from_rows = GroupRows(q_members_, member, DType::kF32),
                              .to = message->data(),
                              .to_rows = MemberRows(q_members_, member, model_.dtype),
                              .heads = slice_.q_heads,
                              .tokens = tokens,
                              .head_dim = model_.head_dim}));
        return message;
      },
      .receive_bytes = [&](int) { return slice_.q_bytes(q_members_.ChunkTokens(member_)); },
      .accept =
          [&](int member, BufferRef message) {
            output.parts[member] = std::move(message);
            return absl::OkStatus();
          },
  });
  if (!status.ok()) return status;
  return output;
}

absl::Status HeadExchange::TensorToHeads(BufferRef tensor, const TokenLayout& members, int all_heads,
                                         int heads, void* to) {
  const auto tensor_bytes = [this](int64_t tokens, int64_t tensor_heads) {
    return tokens * tensor_heads * model_.head_dim * static_cast<int64_t>(DTypeBytes(model_.dtype));
  };
  return AllToAll({
      .send = [&](int member) -> absl::StatusOr<BufferRef> {
        const int64_t first_head = int64_t{member} * all_heads / heads_;
        const int64_t tokens = members.ChunkTokens(member_);
        return PartOf(tensor, tensor_bytes(tokens, first_head), tensor_bytes(tokens, heads));
      },
      .receive_bytes = [&](int member) { return tensor_bytes(members.ChunkTokens(member), heads); },
      .accept =
          [&](int member, BufferRef message) {
            return Copy({.from = message->data(),
                         .from_rows = MemberRows(members, member, model_.dtype),
                         .to = to,
                         .to_rows = GroupRows(members, member, model_.dtype),
                         .heads = heads,
                         .tokens = members.ChunkTokens(member),
                         .head_dim = model_.head_dim});
          },
  });
}

absl::Status HeadExchange::AllToAll(const Moves& moves) {
  const char* const name = OperationName(Traffic::kAllToAll);
  SpanTimer under_way(nullptr, recorder_, {.kind = SpanKind::kTransfer, .what = name});
  const auto rotated = [this](int by) { return (member_ + by + heads_) % heads_; };
  std::vector<std::unique_ptr<PendingReceive>> pending;
  for (int step = 1; step < heads_; ++step) {
    const int to = rotated(step), from = rotated(-step);
    ASSIGN_OR_RETURN(BufferRef message, moves.send(to));
    stats_.sent[Traffic::kAllToAll] += static_cast<int64_t>(message->size_bytes());
    ASSIGN_OR_RETURN(
        std::unique_ptr<PendingReceive> receive,
        communicator_.SendReceive(Traffic::kAllToAll, first_rank_ + to, std::move(message),
                                  first_rank_ + from, static_cast<size_t>(moves.receive_bytes(from))));
    pending.push_back(std::move(receive));
  }
  ASSIGN_OR_RETURN(BufferRef own, moves.send(member_));
  RETURN_IF_ERROR(moves.accept(member_, std::move(own)));
  for (int step = 1; step < heads_; ++step) {
    ASSIGN_OR_RETURN(BufferRef message, [&] {
      SpanTimer timer(&stats_.wait_seconds[Traffic::kAllToAll], recorder_,
                      {.kind = SpanKind::kWait, .what = name});
      return pending[step - 1]->Wait(MonotonicNow() + wait_timeout_);
    }());
    RETURN_IF_ERROR(moves.accept(rotated(-step), std::move(message)));
  }
  return absl::OkStatus();
}

absl::Status HeadExchange::Copy(const CopyHeadsArgs& args) {
  SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "reorder"});
  return stream_.CopyHeads(args);
}

HeadRows HeadExchange::MemberRows(const TokenLayout& members, int member, DType dtype) const {
  return {.dtype = dtype,
          .head_stride = members.ChunkTokens(member) * model_.head_dim,
          .slot_stride = model_.head_dim};
}

HeadRows HeadExchange::GroupRows(const TokenLayout& members, int member, DType dtype) const {
  return {.dtype = dtype,
          .head_stride = members.tokens() * model_.head_dim,
          .slot_stride = model_.head_dim,
          .slots = members.Positions(member)};
}

}  // namespace meshfill
