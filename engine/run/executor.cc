#include "engine/run/executor.h"

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/run/timeline_recorder.h"
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

// A received chunk, or this rank's own, and what still needs it.
struct Chunk {
  BufferRef buffer;
  int blocks_left;
  int sends_left;

  void Release() {
    if (blocks_left == 0 && sends_left == 0) buffer.reset();
  }
};

// One row of the tile: O#u.
struct Row {
  BufferRef partial;  // f32; null until the row's first block or an adopted arrival
  BufferRef arrived;  // in the wire's dtype: came before the row had a state to merge it into
};

// One layer on one rank.
class LayerRun {
 public:
  LayerRun(const Plan& plan, const ModelShape& model, int rank, Stream& stream, Communicator& communicator,
           absl::Duration wait_timeout, RankStats& stats, TimelineRecorder* recorder, LayerChunks own,
           int64_t window)
      : plan_(plan),
        model_(model.HeadSlice(plan.heads)),
        layout_(plan.layout.Groups(plan.heads)),
        member_(rank % plan.heads),
        rank_(rank / plan.heads),
        mesh_(plan.tile),
        stream_(stream),
        communicator_(communicator),
        wait_timeout_(wait_timeout),
        stats_(stats),
        recorder_(recorder),
        window_(window),
        scale_(1.0f / std::sqrt(static_cast<float>(model.head_dim))),
        rows_(plan.tile.a) {
    const auto [a, b] = plan.tile;
    for (int u = 0; u < a; ++u)
      q_.push_back({.buffer = nullptr, .blocks_left = b, .sends_left = u < a - 1 ? 1 : 0});
    for (int v = 0; v < b; ++v)
      kv_.push_back({.buffer = nullptr, .blocks_left = a, .sends_left = v < b - 1 ? 1 : 0});
    q_[0].buffer = std::move(own.q);
    kv_[0].buffer = std::move(own.kv);
  }

  absl::StatusOr<BufferRef> Run() {
    for (const Step& step : plan_.schedule.steps) {
      RETURN_IF_ERROR(RunStep(step));
    }
    return std::move(rows_[0].partial);
  }

 private:
  // A communication under way.
  struct Transfer {
    Traffic traffic = Traffic::kQ;
    TimelineRecorder::Moment start;
    std::unique_ptr<PendingReceive> pending;
  };

  absl::Status RunStep(const Step& step) {
    if (!step.comm.has_value()) return ComputeBlocks(step);
    ASSIGN_OR_RETURN(Transfer transfer, Start(*step.comm));
    RETURN_IF_ERROR(ComputeBlocks(step));
    ASSIGN_OR_RETURN(BufferRef message, WaitFor(transfer));
    return Accept(*step.comm, std::move(message));
  }

  absl::Status ComputeBlocks(const Step& step) {
    for (const BlockIndex& block : step.blocks) {
      RETURN_IF_ERROR(ComputeBlock(block));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Transfer> Start(Traffic traffic) {
    switch (traffic) {
      case Traffic::kQ: {
        Chunk& chunk = q_[q_received_];
        --chunk.sends_left;
        absl::StatusOr<Transfer> transfer =
            SendReceive(Traffic::kQ, mesh_.QSendTo(rank_), chunk.buffer, mesh_.QReceiveFrom(rank_),
                        model_.q_bytes(QTokens(q_received_ + 1)));
        chunk.Release();
        return transfer;
      }
      case Traffic::kKv: {
        Chunk& chunk = kv_[kv_received_];
        --chunk.sends_left;
        absl::StatusOr<Transfer> transfer =
            SendReceive(Traffic::kKv, mesh_.KvSendTo(rank_), chunk.buffer, mesh_.KvReceiveFrom(rank_),
                        model_.kv_bytes(KvTokens(kv_received_ + 1)));
        chunk.Release();
        return transfer;
      }
      case Traffic::kO: {
        ASSIGN_OR_RETURN(BufferRef message, WireForm(o_sent_ + 1));
        return SendReceive(Traffic::kO, mesh_.QSendTo(rank_), std::move(message), mesh_.QReceiveFrom(rank_),
                           model_.partial_bytes(QTokens(ArrivingRow()), plan_.partial_dtype));
      }
      case Traffic::kDq:
      case Traffic::kDkv:
      case Traffic::kAllToAll:
      case Traffic::kGather:
        break;
    }
    return absl::InternalError("unknown communication in a schedule");
  }

  absl::StatusOr<Transfer> SendReceive(Traffic traffic, int to, BufferRef message, int from,
                                       int64_t receive_bytes) {
    stats_.sent[traffic] += static_cast<int64_t>(message->size_bytes());
    TimelineRecorder::Moment start;
    if (recorder_ != nullptr && recorder_->keeps_spans()) start = recorder_->Now();
    ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> pending,
                     communicator_.SendReceive(traffic, GlobalRank(to), std::move(message), GlobalRank(from),
                                               static_cast<size_t>(receive_bytes)));
    return Transfer{.traffic = traffic, .start = std::move(start), .pending = std::move(pending)};
  }

  absl::StatusOr<BufferRef> WaitFor(Transfer& transfer) {
    const char* const name = OperationName(transfer.traffic);
    absl::StatusOr<BufferRef> message = [&] {
      SpanTimer timer(&stats_.wait_seconds[transfer.traffic], recorder_,
                      {.kind = SpanKind::kWait, .what = name});
      return transfer.pending->Wait(MonotonicNow() + wait_timeout_);
    }();
    if (recorder_ != nullptr && recorder_->keeps_spans()) {
      recorder_->Record(Span{.kind = SpanKind::kTransfer, .what = name}, nullptr, std::move(transfer.start),
                        recorder_->Now());
    }
    return message;
  }

  absl::Status Accept(Traffic traffic, BufferRef message) {
    switch (traffic) {
      case Traffic::kQ:
        q_[++q_received_].buffer = std::move(message);
        return absl::OkStatus();
      case Traffic::kKv:
        kv_[++kv_received_].buffer = std::move(message);
        return absl::OkStatus();
      case Traffic::kO: {
        const int row = ArrivingRow();
        ++o_sent_;
        return AcceptPartial(row, std::move(message));
      }
      case Traffic::kDq:
      case Traffic::kDkv:
      case Traffic::kAllToAll:
      case Traffic::kGather:
        break;
    }
    return absl::InternalError("unknown communication in a schedule");
  }

  absl::Status ComputeBlock(BlockIndex block) {
    Chunk& q = q_[block.u];
    Chunk& kv = kv_[block.v];
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
          .q = q.buffer->data(),
          .k = kv.buffer->data(),
          .v = kv.buffer->data<std::byte>() + kv.buffer->size_bytes() / 2,
          .q_tokens = q_tokens,
          .k_tokens = KvTokens(block.v),
          .q_heads = model_.q_heads,
          .kv_heads = model_.kv_heads,
          .head_dim = model_.head_dim,
          .band = {.q = layout_.Positions(mesh_.QChunk(rank_, block.u)),
                   .k = layout_.Positions(mesh_.KvChunk(rank_, block.v)),
                   .window = window_},
          .scale = scale_,
          .carry_in = carry_in,
          .o = static_cast<float*>(state.o),
          .lse = state.lse,
      }));
    }
    ++stats_.blocks;
    --q.blocks_left;
    --kv.blocks_left;
    q.Release();
    kv.Release();
    if (row.arrived == nullptr) return absl::OkStatus();
    return Merge(row, q_tokens, *std::exchange(row.arrived, nullptr));
  }

  // A partial that arrives for a row not yet begun becomes its state as it is, without a pass over it; in a
  // narrower dtype it waits for the row's first block.
  absl::Status AcceptPartial(int u, BufferRef message) {
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

  // O#u as it travels; this rank needs it no more.
  absl::StatusOr<BufferRef> WireForm(int u) {
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

  int ArrivingRow() const { return (o_sent_ + 2) % plan_.tile.a; }
  int64_t QTokens(int u) const { return layout_.ChunkTokens(mesh_.QChunk(rank_, u)); }
  int64_t KvTokens(int v) const { return layout_.ChunkTokens(mesh_.KvChunk(rank_, v)); }
  int GlobalRank(int mesh_rank) const { return mesh_rank * plan_.heads + member_; }

  const Plan& plan_;
  const ModelShape model_;    // with the heads of this mesh
  const TokenLayout layout_;  // over the ranks of the mesh, which are head groups
  const int member_;          // of its head group: which of the h meshes
  const int rank_;            // in the mesh
  const Mesh mesh_;
  Stream& stream_;
  Communicator& communicator_;
  const absl::Duration wait_timeout_;
  RankStats& stats_;
  TimelineRecorder* const recorder_;
  const int64_t window_;
  const float scale_;

  int q_received_ = 0;     // Recv Q that have ended; Q#0 … Q#q_received_ have been here
  int kv_received_ = 0;    // Recv KV likewise
  int o_sent_ = 0;         // Send O that have ended
  std::vector<Chunk> q_;   // [a], by local index
  std::vector<Chunk> kv_;  // [b]
  std::vector<Row> rows_;  // [a]
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

absl::StatusOr<BufferRef> AttentionExecutor::Run(LayerChunks chunks, int64_t window) {
  SpanTimer timer(&stats_.attention_seconds, recorder_);
  return LayerRun(plan_, model_, rank_, stream_, communicator_, wait_timeout_, stats_, recorder_,
                  std::move(chunks), window)
      .Run();
}

}  // namespace meshfill
