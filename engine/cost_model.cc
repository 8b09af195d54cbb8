#include "engine/cost_model.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace meshfill {
namespace {

// For about so long a system's scheduler lets a thread run while another one waits for its core.
constexpr double kTimeSliceSeconds = 3e-3;

// What the pool takes between two points where ranks wait for each other, where its busiest rank needs
// `largest` and all of them `mean` on average, at the speed that each has when all run. Ranks that share
// cores, and not evenly, take turns: three on two cores run two at first and then one, unless they run for
// longer than the scheduler's time slice.
double PoolSeconds(const PoolSpeed& speed, double largest, double mean) {
  const double shared = std::max(largest / speed.lone_rank_speedup, mean);
  const double in_turns = std::ceil(speed.lone_rank_speedup - 1e-9) * mean / speed.lone_rank_speedup;
  return shared + std::clamp(in_turns - shared, 0.0, kTimeSliceSeconds);
}

// How the keys are dealt: those of a cached prefix like those of the prompt.
TokenLayout KvLayout(const TokenLayout& layout, int64_t cached_tokens) {
  if (cached_tokens == 0) return layout;
  return TokenLayout::Make(layout.kind(), layout.ranks(), layout.tokens() + cached_tokens, layout.stripe())
      .value();
}

// Of the prompt's queries with its own keys and those before it.
double PairsAfter(const TokenLayout& layout, int64_t cached_tokens, int64_t window) {
  return VisiblePairs(cached_tokens + layout.tokens(), window) - VisiblePairs(cached_tokens, window);
}

// Visible pairs of a heavy block, for which the ranks wait in lockstep. Striped and zigzag layouts deal every
// block the same share of the prompt's pairs; under the contiguous one, every step has some rank at a block
// that sees all.
double HeavyBlockPairs(const TokenLayout& layout, int64_t window, int64_t cached_tokens) {
  const TokenLayout kv_layout = KvLayout(layout, cached_tokens);
  const double chunk = static_cast<double>(layout.LargestChunkTokens());
  const double kv_chunk = static_cast<double>(kv_layout.LargestChunkTokens());
  if (layout.kind() == LayoutKind::kContiguous && layout.ranks() > 1) {
    return chunk * (window == 0 ? kv_chunk : std::min(kv_chunk, static_cast<double>(window)));
  }
  return PairsAfter(layout, cached_tokens, window) * (chunk / static_cast<double>(layout.tokens())) *
         (kv_chunk / static_cast<double>(kv_layout.tokens()));
}

double BlockSeconds(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                    int64_t window, int64_t cached_tokens) {
  const auto seconds = [&](double pairs, double rows) {
    return 4.0 * model.head_dim * model.q_heads * pairs / speed.attention_flops_per_second +
           model.q_heads * rows * speed.block_row_seconds;
  };
  const double ranks = layout.ranks();
  const auto tokens = static_cast<double>(layout.tokens());
  return PoolSeconds(speed,
                     seconds(HeavyBlockPairs(layout, window, cached_tokens),
                             static_cast<double>(layout.LargestChunkTokens())),
                     seconds(PairsAfter(layout, cached_tokens, window) / (ranks * ranks), tokens / ranks));
}

// What is local to a token, in all layers.
double TokenWorkSeconds(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout) {
  const auto pool_seconds = [&](const auto& seconds) {
    return PoolSeconds(speed, seconds(static_cast<double>(layout.LargestChunkTokens())),
                       seconds(static_cast<double>(layout.tokens()) / layout.ranks()));
  };
  const double flops = ProjectionFlopsPerToken(model) / model.layers;
  const auto layer = [&](double tokens) {
    const double slices = std::ceil(tokens / static_cast<double>(speed.slice_tokens));
    return tokens * flops / speed.gemm_flops_per_second + slices * speed.slice_seconds;
  };
  const auto begin = [&](double tokens) { return tokens * speed.token_seconds; };
  return model.layers * pool_seconds(layer) + pool_seconds(begin);
}

// On one rank, while the others wait.
double LmHeadSeconds(const ModelShape& model, const PoolSpeed& speed) {
  const double bytes =
      static_cast<double>(model.hidden * model.vocab) * static_cast<double>(DTypeBytes(model.dtype));
  return LmHeadFlops(model) / speed.gemm_flops_per_second / speed.lone_rank_speedup +
         bytes / speed.lm_head_bytes_per_second;
}

double SecondsBesideAttention(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout) {
  return speed.start_seconds + TokenWorkSeconds(model, speed, layout) + LmHeadSeconds(model, speed);
}

// Layers without a sliding window, and with one.
template <typename Visit>
void ForEachWindow(const ModelShape& model, Visit visit) {
  if (model.windowed_layers < model.layers) visit(model.layers - model.windowed_layers, 0);
  if (model.windowed_layers > 0) visit(model.windowed_layers, model.sliding_window);
}

// Of one mesh, whose heads `model` has: its ranks are the head groups.
PlanShape MeshOf(const PlanShape& shape) {
  PlanShape mesh = shape;
  mesh.layout = shape.layout.Groups(shape.heads);
  mesh.heads = 1;
  return mesh;
}

// Of the longest chunk in one mesh.
double TransferSeconds(const ModelShape& model, const PlanShape& mesh, CommKind comm) {
  const int64_t chunk = mesh.layout.LargestChunkTokens();
  switch (comm) {
    case CommKind::kNone:
      return 0;
    case CommKind::kRecvQ:
      return mesh.links.q.Seconds(static_cast<double>(model.q_bytes(chunk)));
    case CommKind::kRecvKv: {
      const int64_t kv_chunk = KvLayout(mesh.layout, mesh.cached_tokens).LargestChunkTokens();
      return mesh.links.kv.Seconds(static_cast<double>(model.kv_bytes(kv_chunk)));
    }
    case CommKind::kSendO:
      return mesh.links.q.Seconds(static_cast<double>(model.partial_bytes(chunk, mesh.partial_dtype)));
  }
  return 0;
}

// How many blocks' time a transfer takes, rounded, and 1 to a·b. `model` has the heads of one mesh.
OverlapCosts TransferBlocks(const ModelShape& model, const PoolSpeed& speed, const PlanShape& mesh,
                            double (*round)(double)) {
  const auto block_seconds = [&](int64_t window) {
    return BlockSeconds(model, speed, mesh.layout, window, mesh.cached_tokens);
  };
  const double average = (block_seconds(model.sliding_window) * model.windowed_layers +
                          block_seconds(0) * (model.layers - model.windowed_layers)) /
                         model.layers;
  const auto cost = [&](CommKind comm) {
    const double blocks = round(TransferSeconds(model, mesh, comm) / average);
    return static_cast<int>(std::clamp<double>(blocks, 1, mesh.tile.ranks()));
  };
  return {.c_q = cost(CommKind::kRecvQ), .c_kv = cost(CommKind::kRecvKv), .c_o = cost(CommKind::kSendO)};
}

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

  void Start(CommKind comm) {
    if (comm == CommKind::kSendO && !adopt_) {
      Add(message_bytes_);
      live_ -= row_bytes_;
    }
    if (shared_) return;
    if (comm == CommKind::kRecvQ) Add(q_bytes_);
    if (comm == CommKind::kRecvKv) Add(kv_bytes_);
    if (comm == CommKind::kSendO) Add(message_bytes_);
  }

  void RunBlock(BlockIndex block) {
    Row& row = rows_[block.u];
    if (row != Row::kBegun) Add(row_bytes_);
    if (row == Row::kArrived) live_ -= message_bytes_;
    row = Row::kBegun;
    Use(q_uses_[block.u], q_bytes_);
    Use(kv_uses_[block.v], kv_bytes_);
  }

  void End(CommKind comm) {
    if (comm == CommKind::kRecvQ) Use(q_uses_[q_received_++], q_bytes_);
    if (comm == CommKind::kRecvKv) Use(kv_uses_[kv_received_++], kv_bytes_);
    if (comm != CommKind::kSendO) return;
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

// Activations at their peak, over all ranks: the residual stream, the RoPE tables and the slice buffers of
// each rank (rank_runner.h), which live throughout, and those of a layer's attention.
int64_t PeakBytes(const ModelShape& model, int64_t most_slice_tokens, const PlanShape& shape,
                  const Schedule& schedule) {
  const int64_t tokens = shape.layout.tokens();
  const int64_t residual = tokens * model.hidden * 4;
  const int64_t rope_tables = tokens * model.head_dim * 4;  // cos and sin of head_dim/2 angles each
  const int64_t q_width = model.q_elements(1);
  const int64_t slice_width = model.hidden +
                              std::max(q_width + model.kv_elements(1), 2 * model.intermediate) +
                              std::max(q_width, model.intermediate);
  int64_t slice_tokens = 0;
  for (int rank = 0; rank < shape.layout.ranks(); ++rank) {
    slice_tokens += std::min(most_slice_tokens, shape.layout.ChunkTokens(rank));
  }
  const int64_t slices = slice_tokens * slice_width * static_cast<int64_t>(DTypeBytes(model.dtype));
  return residual + rope_tables + slices +
         std::max(AttentionPeak(model, shape, schedule).Run(), ExchangePeakBytes(model, shape));
}

// That a rank sends in one layer: its own tokens' Q and KV to every other member of its head group, and every
// other's O. `slice` has a member's heads.
int64_t AllToAllBytes(const ModelShape& slice, int heads, int64_t own_tokens, int64_t own_kv_tokens,
                      int64_t group_tokens) {
  return (heads - 1) * (slice.q_bytes(own_tokens) + slice.kv_bytes(own_kv_tokens)) +
         slice.q_bytes(group_tokens - own_tokens);
}

// LayerCommBytes of the rank that sends most. A rank sends its groups' chunks but one of each kind, so that
// the groups' sums give all ranks' bytes in time O(n).
CommBytes LargestLayerCommBytes(const ModelShape& model, const PlanShape& shape) {
  const auto& [layout, heads, tile, partial_dtype, cached_tokens, links, one_memory] = shape;
  const Mesh mesh(tile);
  const ModelShape slice = model.HeadSlice(heads);
  const TokenLayout groups = layout.Groups(heads);
  const TokenLayout kv_layout = KvLayout(layout, cached_tokens);
  const TokenLayout kv_groups = kv_layout.Groups(heads);
  std::vector<int64_t> chunk_tokens(mesh.ranks());
  std::vector<int64_t> kv_chunk_tokens(mesh.ranks());
  std::vector<int64_t> q_group_tokens(tile.b, 0);   // of mesh ranks a·g … a·g + a−1
  std::vector<int64_t> kv_group_tokens(tile.a, 0);  // of mesh ranks g, g + a, g + 2a …
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    chunk_tokens[rank] = groups.ChunkTokens(rank);
    kv_chunk_tokens[rank] = kv_groups.ChunkTokens(rank);
    q_group_tokens[rank / tile.a] += chunk_tokens[rank];
    kv_group_tokens[rank % tile.a] += kv_chunk_tokens[rank];
  }
  CommBytes largest;
  for (int global_rank = 0; global_rank < layout.ranks(); ++global_rank) {
    const int rank = global_rank / heads;
    const int64_t q_tokens = q_group_tokens[rank / tile.a];
    const int64_t kv_tokens = kv_group_tokens[rank % tile.a];
    const int64_t last_q_tokens = chunk_tokens[mesh.QChunk(rank, tile.a - 1)];
    const int64_t last_kv_tokens = kv_chunk_tokens[mesh.KvChunk(rank, tile.b - 1)];
    const int64_t all_to_all = heads == 1
                                   ? 0
                                   : AllToAllBytes(slice, heads, layout.ChunkTokens(global_rank),
                                                   kv_layout.ChunkTokens(global_rank), chunk_tokens[rank]);
    const CommBytes bytes = {.q = slice.q_bytes(q_tokens - last_q_tokens),
                             .kv = slice.kv_bytes(kv_tokens - last_kv_tokens),
                             .o = slice.partial_bytes(q_tokens - chunk_tokens[rank], partial_dtype),
                             .all_to_all = all_to_all};
    if (bytes.total() > largest.total()) largest = bytes;
  }
  return largest;
}

}  // namespace

CommBytes LayerCommBytes(const ModelShape& model, const TokenLayout& layout, int heads, Tile tile,
                         DType partial_dtype, int rank, int64_t cached_tokens) {
  const Mesh mesh(tile);
  const ModelShape slice = model.HeadSlice(heads);
  const TokenLayout groups = layout.Groups(heads);
  const TokenLayout kv_layout = KvLayout(layout, cached_tokens);
  const TokenLayout kv_groups = kv_layout.Groups(heads);
  const int mesh_rank = rank / heads;
  CommBytes bytes;
  for (int u = 0; u < tile.a - 1; ++u) {  // Q#0 … Q#a−2 and O#1 … O#a−1 leave
    bytes.q += slice.q_bytes(groups.ChunkTokens(mesh.QChunk(mesh_rank, u)));
    bytes.o += slice.partial_bytes(groups.ChunkTokens(mesh.QChunk(mesh_rank, u + 1)), partial_dtype);
  }
  for (int v = 0; v < tile.b - 1; ++v)
    bytes.kv += slice.kv_bytes(kv_groups.ChunkTokens(mesh.KvChunk(mesh_rank, v)));
  bytes.all_to_all = AllToAllBytes(slice, heads, layout.ChunkTokens(rank), kv_layout.ChunkTokens(rank),
                                   groups.ChunkTokens(mesh_rank));
  return bytes;
}

OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return TransferBlocks(model.HeadSlice(shape.heads), speed, MeshOf(shape),
                        [](double blocks) { return std::ceil(blocks); });
}

OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return TransferBlocks(model.HeadSlice(shape.heads), speed, MeshOf(shape),
                        [](double blocks) { return std::floor(blocks); });
}

double AttentionSeconds::Transfer(CommKind comm) const {
  switch (comm) {
    case CommKind::kNone:
      return 0;
    case CommKind::kRecvQ:
      return recv_q;
    case CommKind::kRecvKv:
      return recv_kv;
    case CommKind::kSendO:
      return send_o;
  }
  return 0;
}

double AttentionSeconds::Compute(Tile tile) const {
  return tile.ranks() * block + (tile.a - 1) * merge + reorder_to_heads + reorder_to_tokens;
}

double AttentionSeconds::Wait(const Schedule& schedule) const {
  double wait = to_heads + to_tokens;
  for (const Step& step : schedule.steps) {
    wait += std::max(0.0, Transfer(step.comm) - static_cast<double>(step.blocks.size()) * block);
  }
  return wait;
}

double AttentionSeconds::LeastWait(Tile tile) const {
  const double transfers = (tile.a - 1) * (recv_q + send_o) + (tile.b - 1) * recv_kv;
  return to_heads + to_tokens + std::max(0.0, transfers - tile.ranks() * block);
}

AttentionSeconds AttentionSecondsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                                    int64_t window) {
  const ModelShape slice = model.HeadSlice(shape.heads);
  const PlanShape mesh = MeshOf(shape);
  const auto rework = [&](int64_t bytes) {
    return static_cast<double>(bytes) / speed.merge_bytes_per_second;
  };
  const int64_t chunk = mesh.layout.LargestChunkTokens();
  AttentionSeconds seconds = {.block = BlockSeconds(slice, speed, mesh.layout, window, shape.cached_tokens),
                              .recv_q = TransferSeconds(slice, mesh, CommKind::kRecvQ),
                              .recv_kv = TransferSeconds(slice, mesh, CommKind::kRecvKv),
                              .send_o = TransferSeconds(slice, mesh, CommKind::kSendO),
                              .merge = rework(slice.partial_bytes(chunk, shape.partial_dtype))};
  if (shape.heads == 1) return seconds;
  const TokenLayout kv_layout = KvLayout(shape.layout, shape.cached_tokens);
  const int64_t own_q_bytes = slice.q_bytes(shape.layout.LargestChunkTokens());
  const int64_t own_kv_bytes = slice.kv_bytes(kv_layout.LargestChunkTokens());
  const auto all_to_alls = [&](int count, int64_t bytes) {
    const Link& link = shape.links.all_to_all;
    return count * link.latency_seconds +
           static_cast<double>((shape.heads - 1) * bytes) / link.bytes_per_second;
  };
  seconds.to_heads = all_to_alls(3, own_q_bytes + own_kv_bytes);  // of Q, K and V
  seconds.to_tokens = all_to_alls(1, own_q_bytes);
  const int64_t kv_chunk = kv_layout.Groups(shape.heads).LargestChunkTokens();
  seconds.reorder_to_heads = rework(slice.q_bytes(chunk) + slice.kv_bytes(kv_chunk));
  seconds.reorder_to_tokens = rework(slice.q_bytes(chunk));
  return seconds;
}

Prediction PredictTimeAndMemory(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                                const Schedule& schedule) {
  Prediction predicted = {.links = shape.links};
  predicted.compute_seconds = SecondsBesideAttention(model, speed, shape.layout);
  ForEachWindow(model, [&](int layers, int64_t window) {
    const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, window);
    predicted.compute_seconds += layers * seconds.Compute(schedule.tile);
    predicted.comm_wait_seconds += layers * seconds.Wait(schedule);
  });
  predicted.seconds = predicted.compute_seconds + predicted.comm_wait_seconds;
  predicted.peak_bytes = PeakBytes(model, speed.slice_tokens, shape, schedule);
  return predicted;
}

double LeastSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  double least = SecondsBesideAttention(model, speed, shape.layout);
  ForEachWindow(model, [&](int layers, int64_t window) {
    const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, window);
    least += layers * (seconds.Compute(shape.tile) + seconds.LeastWait(shape.tile));
  });
  return least;
}

CommBytes PrefillCommBytes(const ModelShape& model, const PlanShape& shape) {
  CommBytes bytes = LargestLayerCommBytes(model, shape);
  bytes.q *= model.layers;
  bytes.kv *= model.layers;
  bytes.o *= model.layers;
  bytes.all_to_all *= model.layers;
  return bytes;
}

Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule) {
  Prediction predicted = PredictTimeAndMemory(model, speed, shape, schedule);
  predicted.comm_bytes = PrefillCommBytes(model, shape);
  return predicted;
}

}  // namespace meshfill
