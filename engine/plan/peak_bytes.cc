#include "engine/plan/peak_bytes.h"

#include <algorithm>
#include <vector>

#include "engine/model/layer_shape.h"

namespace meshfill {
namespace {

// The most bytes of chunks and partial outputs that are alive at once in one layer's attention, over all
// ranks. For each u, Q#u of all ranks are all chunks of the prompt, so that a live row of the tile is one O
// of the whole prompt, and so on; the schedule says what lives. Ranks of one process share a chunk by
// reference, however many hold it: Q and KV count once, and a partial output leaves as its receiver adopts
// it. Elsewhere what arrives has a buffer from the start of its step, and what leaves keeps its own to the
// step's end. A rank that runs ahead of its neighbour adds the O that the neighbour has yet to take.
class AttentionPeak {
 public:
  AttentionPeak(const ModelShape& model, const PlanShape& shape, const Schedule& schedule)
      : schedule_(schedule),
        shared_(shape.one_memory),
        adopt_(shape.partial_dtype == DType::kF32),
        q_bytes_(model.q_bytes(shape.layout.tokens())),
        kv_bytes_(shape.heads *
                  model.HeadSlice(shape.heads).kv_bytes(shape.cached_tokens + shape.layout.tokens())),
        row_bytes_(model.partial_bytes(shape.layout.tokens(), DType::kF32)),
        message_bytes_(model.partial_bytes(shape.layout.tokens(), shape.partial_dtype)),
        q_uses_(schedule.tile.a, schedule.tile.b + 1),
        kv_uses_(schedule.tile.b, schedule.tile.a + 1),
        rows_(schedule.tile.a, Row::kNone) {
    --q_uses_.back();  // the last chunk is not passed on
    --kv_uses_.back();
  }

  int64_t Run() {
    Add(q_bytes_ + kv_bytes_);
    for (const Step& step : schedule_.steps) {
      Start(step.comm);
      for (const BlockIndex& block : step.blocks) RunBlock(block);
      End(step.comm);
    }
    return peak_;
  }

 private:
  enum class Row { kNone, kArrived, kBegun };  // kArrived: in a dtype that waits for the first block

  void Add(int64_t bytes) { peak_ = std::max(peak_, live_ += bytes); }
  // With the last use of a chunk that nobody else holds.
  void Use(int& uses, int64_t bytes) {
    if (--uses == 0 && !shared_) live_ -= bytes;
  }

  void Start(std::optional<Traffic> comm) {
    if (comm == Traffic::kO && !adopt_) {
      Add(message_bytes_);
      live_ -= row_bytes_;
    }
    if (shared_) return;
    if (comm == Traffic::kQ) Add(q_bytes_);
    if (comm == Traffic::kKv) Add(kv_bytes_);
    if (comm == Traffic::kO) Add(message_bytes_);
  }

  void RunBlock(BlockIndex block) {
    Row& row = rows_[block.u];
    if (row != Row::kBegun) Add(row_bytes_);
    if (row == Row::kArrived) live_ -= message_bytes_;
    row = Row::kBegun;
    Use(q_uses_[block.u], q_bytes_);
    Use(kv_uses_[block.v], kv_bytes_);
  }

  void End(std::optional<Traffic> comm) {
    if (comm == Traffic::kQ) Use(q_uses_[q_received_++], q_bytes_);
    if (comm == Traffic::kKv) Use(kv_uses_[kv_received_++], kv_bytes_);
    if (comm != Traffic::kO) return;
    if (!shared_) live_ -= message_bytes_;  // what was sent
    Row& row = rows_[(++o_sent_ + 1) % schedule_.tile.a];
    if (row == Row::kBegun) {
      live_ -= message_bytes_;
    } else {
      row = adopt_ ? Row::kBegun : Row::kArrived;
    }
  }

  const Schedule& schedule_;
  const bool shared_;
  const bool adopt_;
  const int64_t q_bytes_;  // of one chunk of all ranks
  const int64_t kv_bytes_;
  const int64_t row_bytes_;
  const int64_t message_bytes_;
  std::vector<int> q_uses_;   // [a]: blocks and the send that a chunk is still needed for
  std::vector<int> kv_uses_;  // [b]
  std::vector<Row> rows_;     // [a]
  int q_received_ = 0;
  int kv_received_ = 0;
  int o_sent_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

// The most bytes alive around the all-to-alls, over all ranks: the tensors of tokens and of heads, and of
// what is on its way, where that has buffers of its own, one more.
int64_t ExchangePeakBytes(const ModelShape& model, const PlanShape& shape) {
  if (shape.heads == 1) return 0;
  const int64_t tokens = shape.layout.tokens();
  const int64_t keys = shape.cached_tokens + tokens;
  const int64_t q = model.q_bytes(tokens);
  const int64_t own_kv = model.kv_bytes(keys);
  const int64_t kv = shape.heads * model.HeadSlice(shape.heads).kv_bytes(keys);
  const int64_t copies = shape.one_memory ? 0 : 1;
  const int64_t q_to_heads = 2 * q + own_kv + copies * q;
  const int64_t kv_to_heads = q + own_kv + kv + copies * kv / 2;  // K, then V
  const int64_t o_to_tokens = model.partial_bytes(tokens, DType::kF32) + q + copies * q;
  return std::max({q_to_heads, kv_to_heads, o_to_tokens});
}

}  // namespace

int64_t PeakBytes(const ModelShape& model, int64_t most_slice_tokens, const PlanShape& shape,
                  const Schedule& schedule) {
  const int64_t tokens = shape.layout.tokens();
  const int64_t residual = tokens * model.hidden * 4;
  const int64_t rope_tables = tokens * model.head_dim * 4;  // cos and sin of head_dim/2 angles each
  const int64_t slice_width = SliceWidthsOf(LayerShapeOf(model)).all();
  int64_t slice_tokens = 0;
  for (int rank = 0; rank < shape.layout.ranks(); ++rank) {
    slice_tokens += std::min(most_slice_tokens, shape.layout.ChunkTokens(rank));
  }
  const int64_t slices = slice_tokens * slice_width * static_cast<int64_t>(DTypeBytes(model.dtype));
  return residual + rope_tables + slices +
         std::max(AttentionPeak(model, shape, schedule).Run(), ExchangePeakBytes(model, shape));
}

}  // namespace meshfill
