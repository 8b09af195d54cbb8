#include "engine/plan/peak_bytes.h"

#include <algorithm>

#include "engine/model/layer_shape.h"
#include "engine/plan/layer_reach.h"
#include "engine/schedule/schedule_walk.h"

namespace meshfill {
namespace {

// Tokens of the prompt, if each rank had as many as the one that has most. Ranks are in different phases of a
// layer at once, and one with few tokens may wait in its worst while one with many is in its own.
int64_t EvenTokens(const PlanShape& shape) {
  return shape.layout.ranks() * shape.layout.LargestChunkTokens();
}

// Bytes of a layer's K and V that are copied to the host until the next layer begins, over all ranks.
int64_t LeavingKvBytes(const ModelShape& model, const PlanShape& shape) {
  return shape.keeps_kv && shape.kv_on_host ? model.kv_bytes(EvenTokens(shape)) : 0;
}

// Whether attention takes the chunk that the projections made.
bool AttendsOwnKv(const PlanShape& shape) { return shape.heads == 1 && shape.cached_tokens == 0; }

// The most bytes of chunks and partial outputs that are alive at once in one layer's attention, over all
// ranks. For each u, Q#u of all ranks are all chunks of the prompt, so that a live row of the tile is one O
// of the whole prompt, and so on; the schedule says what lives. Ranks of one process share a chunk by
// reference, however many hold it: Q and KV count once, and a partial output leaves as its receiver adopts
// it. Elsewhere what arrives has a buffer from the start of its step, and what leaves keeps its own to the
// step's end. A rank that runs ahead of its neighbour adds the O that the neighbour has yet to take. The
// chunk that is on its way to the host is KV#0, or beside the keys of the heads and of the prefix.
class AttentionPeak : public ScheduleVisitor {
 public:
  AttentionPeak(const ModelShape& model, const PlanShape& shape)
      : shared_(shape.one_memory),
        adopt_(shape.partial_dtype == DType::kF32),
        holds_own_kv_(AttendsOwnKv(shape) && LeavingKvBytes(model, shape) > 0),
        q_bytes_(model.q_bytes(EvenTokens(shape))),
        kv_bytes_(shape.heads *
                  model.HeadSlice(shape.heads).kv_bytes(shape.cached_tokens + EvenTokens(shape))),
        row_bytes_(model.partial_bytes(EvenTokens(shape), DType::kF32)),
        message_bytes_(model.partial_bytes(EvenTokens(shape), shape.partial_dtype)) {
    Add(q_bytes_ + kv_bytes_ + (AttendsOwnKv(shape) ? 0 : LeavingKvBytes(model, shape)));
  }

  int64_t peak() const { return peak_; }

  void Start(const Transfer& transfer) {
    if (transfer.traffic == Traffic::kO && !adopt_) {
      Add(message_bytes_);
      live_ -= row_bytes_;
    }
    if (shared_) return;
    if (transfer.traffic == Traffic::kQ) Add(q_bytes_);
    if (transfer.traffic == Traffic::kKv) Add(kv_bytes_);
    if (transfer.traffic == Traffic::kO) Add(message_bytes_);
  }

  // A partial that arrived is the row as it is, or waits for the first block in a dtype of its own.
  void Block(BlockIndex, RowState row) {
    if (row == RowState::kEmpty || (row == RowState::kArrived && !adopt_)) Add(row_bytes_);
    if (row == RowState::kArrived && !adopt_) live_ -= message_bytes_;
  }

  void End(const Transfer& transfer, RowState row) {
    if (transfer.traffic != Traffic::kO) return;
    if (!shared_) live_ -= message_bytes_;  // what was sent
    if (row == RowState::kBegun) live_ -= message_bytes_;
  }

  void FreeQ(int) { live_ -= shared_ ? 0 : q_bytes_; }  // others hold what is shared
  void FreeKv(int kv) { live_ -= shared_ || (kv == 0 && holds_own_kv_) ? 0 : kv_bytes_; }

 private:
  void Add(int64_t bytes) { peak_ = std::max(peak_, live_ += bytes); }

  const bool shared_;
  const bool adopt_;
  const bool holds_own_kv_;  // KV#0, beyond its last block
  const int64_t q_bytes_;    // one Q chunk of each rank
  const int64_t kv_bytes_;
  const int64_t row_bytes_;
  const int64_t message_bytes_;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

// The most bytes of keys, over all ranks, that layers in which some messages are spared (layer_reach.h) hold
// beside the chunks that the walk counts.
//
// Between processes: a copy of what goes on in part, on each rank; of what the walk counts some never
// arrives. In one memory a layer may be over after few messages, so that a rank is layers ahead of one that
// lags, and its chunks wait there. On a ring a message that waits for one rank is one that another waits for:
// with those that ranks compute with, as many as there are ranks at most.
int64_t SparedLayersBytes(const ModelShape& model, const PlanShape& shape) {
  const ModelShape slice = model.HeadSlice(shape.heads);
  int64_t most = 0;
  model.ForEachWindow([&](int64_t window, int) {
    const LayerReach reach(shape, window);
    if (reach.sees_all()) return;
    most = std::max(most, shape.one_memory ? shape.heads * slice.kv_bytes(reach.kv_layout().tokens())
                                           : shape.ranks() * slice.kv_bytes(reach.MostCutKeys()));
  });
  return most;
}

// The most bytes alive around all-to-alls in slices, over all ranks: where the outputs leave for their
// tokens, and where all of the next layer is on its way: O that has not left, Q, K and V as they were
// projected and as they arrive, and their places; beside them K and V of whole chunks, which are kept.
int64_t SlicedExchangePeakBytes(const ModelShape& model, const PlanShape& shape) {
  const int64_t tokens = EvenTokens(shape);
  const int64_t keys = shape.cached_tokens + tokens;
  const int64_t q = model.q_bytes(tokens);
  const int64_t kv = shape.heads * model.HeadSlice(shape.heads).kv_bytes(keys);
  const int64_t copies = shape.one_memory ? 0 : 1;
  const int64_t o_to_tokens = model.partial_bytes(tokens, DType::kF32) + q + copies * q;
  const int64_t to_heads = 2 * q + model.kv_bytes(keys) + (1 + copies) * (q + kv);
  return std::max(o_to_tokens, to_heads) + (shape.keeps_kv ? model.kv_bytes(tokens) : 0);
}

// The most bytes alive around the all-to-alls, over all ranks: the tensors of tokens and of heads, and of
// what is on its way, where that has buffers of its own, one more.
int64_t ExchangePeakBytes(const ModelShape& model, const PlanShape& shape) {
  if (shape.heads == 1) return 0;
  if (shape.exchanges() > 1) return SlicedExchangePeakBytes(model, shape);
  const int64_t tokens = EvenTokens(shape);
  const int64_t keys = shape.cached_tokens + tokens;
  const int64_t q = model.q_bytes(tokens);
  const int64_t own_kv = model.kv_bytes(keys);
  const int64_t kv = shape.heads * model.HeadSlice(shape.heads).kv_bytes(keys);
  const int64_t leaving_kv = LeavingKvBytes(model, shape);
  const int64_t beside_kv = shape.cached_tokens == 0 ? 0 : leaving_kv;  // else it is the own
  const int64_t copies = shape.one_memory ? 0 : 1;
  const int64_t q_to_heads = 2 * q + own_kv + copies * q + beside_kv;
  const int64_t kv_to_heads = q + own_kv + kv + copies * kv / 2 + beside_kv;  // K, then V
  const int64_t o_to_tokens = model.partial_bytes(tokens, DType::kF32) + q + copies * q + leaving_kv;
  return std::max({q_to_heads, kv_to_heads, o_to_tokens});
}

// What members that lag have yet to take of the Q, K and V of those that attend already, over all ranks. Of
// one exchange that is the last tensor, V, which is one piece of memory with K; elsewhere it has left.
int64_t YetToLeaveBytes(const ModelShape& model, const PlanShape& shape) {
  const int64_t keys = shape.cached_tokens + EvenTokens(shape);
  if (shape.exchanges() > 1) return model.q_bytes(EvenTokens(shape)) + model.kv_bytes(keys);
  return shape.heads > 1 && shape.one_memory ? model.kv_bytes(keys) : 0;
}

// The most bytes alive while a rank's keys go behind those of a cached prefix, over all ranks.
int64_t PrefixPeakBytes(const ModelShape& model, const PlanShape& shape) {
  if (shape.cached_tokens == 0) return 0;
  const int64_t tokens = EvenTokens(shape);
  return model.q_bytes(tokens) + model.kv_bytes(tokens) + model.kv_bytes(shape.cached_tokens + tokens);
}

// Bytes of the slices that pass through projections and MLP, over all ranks.
int64_t SlicesBytes(const ModelShape& model, int64_t most_slice_tokens, const PlanShape& shape) {
  const SliceWidths widths = SliceWidthsOf(model);
  int64_t bytes = 0;
  for (int rank = 0; rank < shape.ranks();) {
    const int until = shape.layout.AlikeUntil(rank);
    bytes += (until - rank) * SliceBytes(widths, SliceTokens(shape, rank, most_slice_tokens), model.dtype);
    rank = until;
  }
  return bytes;
}

// Bytes in which all ranks count each expert's tokens.
int64_t ExpertCountersBytes(const ModelShape& model, const PlanShape& shape) {
  return int64_t{shape.ranks()} * model.layers * model.experts.count * 4;
}

}  // namespace

int64_t PeakBytes(const ModelShape& model, int64_t most_slice_tokens, const PlanShape& shape,
                  const Schedule& schedule) {
  const int64_t tokens = shape.layout.tokens();
  const int64_t residual = tokens * model.hidden * 4;
  const int64_t rope_tables =  // cos and sin of rotated_dim/2 angles each
      model.rope_count() * tokens * model.rotated_dim() * 4;
  AttentionPeak attention(model, shape);
  Walk(schedule, attention);
  const int64_t kept = shape.keeps_kv && !shape.kv_on_host ? model.layers * model.kv_bytes(tokens) : 0;
  const int64_t layer =
      std::max({attention.peak() + YetToLeaveBytes(model, shape) + SparedLayersBytes(model, shape),
                ExchangePeakBytes(model, shape), PrefixPeakBytes(model, shape)});
  return residual + rope_tables + SlicesBytes(model, most_slice_tokens, shape) +
         ExpertCountersBytes(model, shape) + kept + layer;
}

}  // namespace meshfill
