#include "engine/run/executor.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/plan/layer_reach.h"
#include "engine/run/timeline_recorder.h"
#include "engine/schedule/schedule_walk.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// A partial output in one buffer, so that it is one message: O [q_heads, tokens, head_dim] in `dtype`, then
// LSE [q_heads, tokens] f32. Rows compute in f32; on the wire O may be bf16 (head_dim is even, which keeps
// the LSE aligned).
struct PartialView {
  PartialView(Buffer& buffer, const ModelShape& model, int64_t tokens, DType dtype)
      : rows(model.q_heads * tokens),
        elements(model.q_elements(tokens)),
        o(buffer.data()),
        lse(reinterpret_cast<float*>(buffer.data<std::byte>() + elements * DTypeBytes(dtype))) {}

  int64_t rows;
  int64_t elements;
  void* o;
  float* lse;
};

// One row of the tile: O#u.
struct Row {
  BufferRef partial;  // f32; null until the row's first block or an adopted arrival
  BufferRef arrived;  // in the wire's dtype: came before the row had a state to merge it into
};

// A communication along one of the rings.
struct UnderWay {
  std::unique_ptr<PendingReceive> pending;  // null: there is none
  TimelineRecorder::Moment start;           // kept where the recorder keeps spans
};

// One layer on one rank.
class LayerRun : public ScheduleVisitor {
 public:
  LayerRun(const Plan& plan, const ModelShape& model, int rank, Stream& stream, Communicator& communicator,
           absl::Duration wait_timeout, RankStats& stats, TimelineRecorder* recorder, LayerChunks own,
           int64_t window, const float* sinks)
      : plan_(plan),
        model_(model.HeadSlice(plan.heads)),
        reach_(plan, window),
        member_(rank % plan.heads),
        rank_(rank / plan.heads),
        mesh_(reach_.mesh()),
        stream_(stream),
        communicator_(communicator),
        wait_timeout_(wait_timeout),
        stats_(stats),
        recorder_(recorder),
        window_(window),
        sinks_(sinks == nullptr ? nullptr : sinks + member_ * model_.q_heads),
        scale_(model.score_scale()),
        q_(plan.tile.a),
        kv_(plan.tile.b),
        rows_(plan.tile.a) {
    q_[0] = std::move(own.q);
    kv_[0] = std::move(own.kv);
  }

  absl::StatusOr<BufferRef> Run() {
    RETURN_IF_ERROR(Walk(plan_.schedule, *this));
    RETURN_IF_ERROR(ApplySinks());
    return std::move(rows_[0].partial);
  }

  // Visits the walk. The communicator holds what is under way.
  static constexpr bool kHandsOver = true;

  absl::Status Start(const Transfer& transfer) {
    switch (transfer.traffic) {
      case Traffic::kQ:
        return StartQ(transfer);
      case Traffic::kKv:
        return StartKv(transfer);
      default:
        return StartO(transfer);
    }
  }

  absl::Status End(const Transfer& transfer, RowState) {
    UnderWay& along = Along(transfer.ring);
    const std::unique_ptr<PendingReceive> pending = std::move(along.pending);
    if (pending == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(BufferRef message, WaitFor(transfer.traffic, *pending, along.start));
    if (transfer.traffic == Traffic::kO) return AcceptPartial(transfer.received, std::move(message));
    (transfer.traffic == Traffic::kQ ? q_ : kv_)[transfer.received] = std::move(message);
    return absl::OkStatus();
  }

  void FreeQ(int u) { q_[u].reset(); }
  void FreeKv(int v) { kv_[v].reset(); }

  absl::Status Block(BlockIndex block, RowState) {
    if (!HasPairs(block)) return absl::OkStatus();
    const Buffer& kv = *kv_[block.v];
    Row& row = rows_[block.u];
    const int64_t q_tokens = QTokens(block.u);
    const bool carry_in = row.partial != nullptr;
    if (!carry_in) {
      ASSIGN_OR_RETURN(BufferRef partial, stream_.Allocate(model_.partial_bytes(q_tokens, DType::kF32)));
      row.partial = std::move(partial);
    }
    const PartialView state(*row.partial, model_, q_tokens, DType::kF32);
    {
      SpanTimer timer(&stats_.block_seconds, recorder_, {.what = "block", .block = block});
      RETURN_IF_ERROR(stream_.AttentionBlock({
          .q = q_[block.u]->data(),
          .k = kv.data(),
          .v = kv.data<std::byte>() + kv.size_bytes() / 2,
          .q_tokens = q_tokens,
          .k_tokens = Held(block.v).slots(),
          .q_heads = model_.q_heads,
          .kv_heads = model_.kv_heads,
          .head_dim = model_.head_dim,
          .band = {.q = reach_.q_layout().Positions(QChunk(block.u)),
                   .k = KvPositions(block.v),
                   .window = window_,
                   .first_q = plan_.cached_tokens},
          .scale = scale_,
          .carry_in = carry_in,
          .o = static_cast<float*>(state.o),
          .lse = state.lse,
      }));
    }
    ++stats_.blocks;
    if (row.arrived == nullptr) return absl::OkStatus();
    return Merge(row, q_tokens, *std::exchange(row.arrived, nullptr));
  }

 private:
  // O#0 is whole. A sink joins a row's denominator once, however many blocks and ranks the row came from.
  absl::Status ApplySinks() {
    if (sinks_ == nullptr) return absl::OkStatus();
    SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "sinks"});
    const PartialView state(*rows_[0].partial, model_, QTokens(0), DType::kF32);
    return stream_.ApplySinks({.o = static_cast<float*>(state.o),
                               .lse = state.lse,
                               .sinks = sinks_,
                               .heads = model_.q_heads,
                               .tokens = QTokens(0),
                               .head_dim = model_.head_dim});
  }

  // Where no rank has anything to send, there is no message; where some have, the others send an empty one.
  absl::Status StartQ(const Transfer& transfer) {
    const int hop = transfer.received;
    if (reach_.LargestQ(hop) == 0) return absl::OkStatus();
    const bool sends = reach_.QReaches(QChunk(transfer.sent), hop);
    BufferRef message = q_[transfer.sent];
    if (!sends) {
      ASSIGN_OR_RETURN(message, stream_.Allocate(0));
    }
    const bool receives = reach_.QReaches(QChunk(transfer.received), hop);
    return SendReceive(transfer, mesh_.QSendTo(rank_), std::move(message), mesh_.QReceiveFrom(rank_),
                       receives ? model_.q_bytes(QTokens(transfer.received)) : 0);
  }

  absl::Status StartKv(const Transfer& transfer) {
    const int hop = transfer.received;
    if (reach_.LargestKv(hop) == 0) return absl::OkStatus();
    const bool outer = transfer.ring == Ring::kKvOuter;
    ASSIGN_OR_RETURN(BufferRef message,
                     KvPart(transfer.sent, reach_.KvReach(mesh_.KvChunk(rank_, transfer.sent), hop)));
    return SendReceive(transfer, outer ? mesh_.KvOuterSendTo(rank_) : mesh_.KvSendTo(rank_),
                       std::move(message),
                       outer ? mesh_.KvOuterReceiveFrom(rank_) : mesh_.KvReceiveFrom(rank_),
                       model_.kv_bytes(Held(transfer.received).slots()));
  }

  absl::Status StartO(const Transfer& transfer) {
    if (reach_.LargestQ(1) == 0) return absl::OkStatus();
    const bool sends = reach_.OReturns(QChunk(transfer.sent));
    ASSIGN_OR_RETURN(BufferRef message, sends ? WireForm(transfer.sent) : stream_.Allocate(0));
    const bool receives = reach_.OReturns(QChunk(transfer.received));
    return SendReceive(transfer, mesh_.QSendTo(rank_), std::move(message), mesh_.QReceiveFrom(rank_),
                       receives ? model_.partial_bytes(QTokens(transfer.received), plan_.partial_dtype) : 0);
  }

  // The rank's own block always counts, so that its row begins even where it has no tokens.
  bool HasPairs(BlockIndex block) const {
    return block == BlockIndex() || reach_.Sees(QChunk(block.u), mesh_.KvChunk(rank_, block.v));
  }

  // What this rank has of KV#v.
  SlotRange Held(int v) const {
    const int chunk = mesh_.KvChunk(rank_, v);
    return v == 0 ? SlotRange{0, reach_.kv_layout().ChunkTokens(chunk)} : reach_.KvReach(chunk, v);
  }

  SlotPositions KvPositions(int v) const {
    const SlotPositions chunk = reach_.kv_layout().Positions(mesh_.KvChunk(rank_, v));
    const int64_t begin = Held(v).begin;
    // A contiguous chunk's, from a slot on: all in one stripe, or in neighbouring ones.
    return begin == 0 ? chunk : SlotPositions{.base = 1, .stride = 1, .width = chunk.At(begin)};
  }

  // The slots `part` of KV#v: the chunk itself, or a copy of them.
  absl::StatusOr<BufferRef> KvPart(int v, SlotRange part) {
    const SlotRange held = Held(v);
    if (part.slots() == 0) return stream_.Allocate(0);
    if (part == held) return kv_[v];
    ASSIGN_OR_RETURN(BufferRef copy, stream_.Allocate(model_.kv_bytes(part.slots())));
    SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "cut"});
    const auto rows = [this](int64_t slots, int64_t first) {
      return HeadRows{.dtype = model_.dtype,
                      .head_stride = slots * model_.head_dim,
                      .slot_stride = model_.head_dim,
                      .slots = {.base = first}};
    };
    for (const size_t half : {0, 1}) {
      RETURN_IF_ERROR(stream_.CopyHeads({.from = kv_[v]->data<std::byte>() + half * kv_[v]->size_bytes() / 2,
                                         .from_rows = rows(held.slots(), part.begin - held.begin),
                                         .to = copy->data<std::byte>() + half * copy->size_bytes() / 2,
                                         .to_rows = rows(part.slots(), 0),
                                         .heads = model_.kv_heads,
                                         .tokens = part.slots(),
                                         .head_dim = model_.head_dim}));
    }
    return copy;
  }

  absl::Status SendReceive(const Transfer& transfer, int to, BufferRef message, int from,
                           int64_t receive_bytes) {
    stats_.sent[transfer.traffic] += static_cast<int64_t>(message->size_bytes());
    UnderWay& along = Along(transfer.ring);
    if (recorder_ != nullptr && recorder_->keeps_spans()) along.start = recorder_->Now();
    ASSIGN_OR_RETURN(along.pending,
                     communicator_.SendReceive(transfer.traffic, GlobalRank(to), std::move(message),
                                               GlobalRank(from), static_cast<size_t>(receive_bytes)));
    return absl::OkStatus();
  }

  absl::StatusOr<BufferRef> WaitFor(Traffic traffic, PendingReceive& pending,
                                    TimelineRecorder::Moment& start) {
    const char* const name = OperationName(traffic);
    absl::StatusOr<BufferRef> message = [&] {
      SpanTimer timer(&stats_.wait_seconds[traffic], recorder_, {.kind = SpanKind::kWait, .what = name});
      return pending.Wait(MonotonicNow() + wait_timeout_);
    }();
    if (recorder_ != nullptr && recorder_->keeps_spans()) {
      recorder_->Record(Span{.kind = SpanKind::kTransfer, .what = name}, nullptr, std::move(start),
                        recorder_->Now());
    }
    return message;
  }

  // A partial that arrives for a row not yet begun becomes its state as it is, without a pass over it; in a
  // narrower dtype it waits for the row's first block.
  absl::Status AcceptPartial(int u, BufferRef message) {
    if (!reach_.OReturns(QChunk(u))) return absl::OkStatus();
    Row& row = rows_[u];
    if (row.partial != nullptr) return Merge(row, QTokens(u), *message);
    (plan_.partial_dtype == DType::kF32 ? row.partial : row.arrived) = std::move(message);
    return absl::OkStatus();
  }

  absl::Status Merge(Row& row, int64_t tokens, Buffer& message) {
    SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "merge"});
    const PartialView state(*row.partial, model_, tokens, DType::kF32);
    const PartialView other(message, model_, tokens, plan_.partial_dtype);
    return stream_.MergePartial({.o = static_cast<float*>(state.o),
                                 .lse = state.lse,
                                 .other_o = other.o,
                                 .other_dtype = plan_.partial_dtype,
                                 .other_lse = other.lse,
                                 .rows = state.rows,
                                 .head_dim = model_.head_dim});
  }

  // O#u as it travels; this rank needs it no more. Where it saw none of the keys here, as it came.
  absl::StatusOr<BufferRef> WireForm(int u) {
    if (rows_[u].arrived != nullptr) return std::move(rows_[u].arrived);
    BufferRef partial = std::move(rows_[u].partial);
    if (plan_.partial_dtype == DType::kF32) return partial;
    SpanTimer timer(&stats_.merge_seconds, recorder_, {.what = "convert"});
    ASSIGN_OR_RETURN(BufferRef message,
                     stream_.Allocate(model_.partial_bytes(QTokens(u), plan_.partial_dtype)));
    const PartialView from(*partial, model_, QTokens(u), DType::kF32);
    const PartialView to(*message, model_, QTokens(u), plan_.partial_dtype);
    RETURN_IF_ERROR(stream_.Convert(static_cast<float*>(from.o), from.elements, plan_.partial_dtype, to.o));
    RETURN_IF_ERROR(stream_.Convert(from.lse, from.rows, DType::kF32, to.lse));
    return message;
  }

  UnderWay& Along(Ring ring) { return under_way_[static_cast<int>(ring)]; }

  int QChunk(int u) const { return mesh_.QChunk(rank_, u); }
  int64_t QTokens(int u) const { return reach_.q_layout().ChunkTokens(QChunk(u)); }
  int GlobalRank(int mesh_rank) const { return mesh_rank * plan_.heads + member_; }

  const Plan& plan_;
  const ModelShape model_;  // the model with the heads of this mesh
  const LayerReach reach_;  // reach of the mesh's chunks, each of a head group
  const int member_;        // index in its head group: which of the h meshes
  const int rank_;          // rank in the mesh
  const Mesh mesh_;
  Stream& stream_;
  Communicator& communicator_;
  const absl::Duration wait_timeout_;
  RankStats& stats_;
  TimelineRecorder* const recorder_;
  const int64_t window_;
  const float* const sinks_;  // sinks of this mesh's heads; null: the layer has none
  const float scale_;

  std::vector<BufferRef> q_;   // [a], by local index; null: not here yet, or no longer
  std::vector<BufferRef> kv_;  // [b]
  std::vector<Row> rows_;      // [a]
  std::array<UnderWay, kRings> under_way_;
};

}  // namespace

AttentionExecutor::AttentionExecutor(const Plan& plan, const ModelShape& model, int rank, Stream& stream,
                                     Communicator& communicator, absl::Duration wait_timeout,
                                     RankStats& stats, TimelineRecorder* recorder)
    : plan_(plan),
      model_(model),
      rank_(rank),
      stream_(stream),
      communicator_(communicator),
      wait_timeout_(wait_timeout),
      stats_(stats),
      recorder_(recorder) {}

absl::StatusOr<BufferRef> AttentionExecutor::Run(LayerChunks chunks, int64_t window, const float* sinks) {
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  return LayerRun(plan_, model_, rank_, stream_, communicator_, wait_timeout_, stats_, recorder_,
                  std::move(chunks), window, sinks)
      .Run();
}

}  // namespace meshfill
