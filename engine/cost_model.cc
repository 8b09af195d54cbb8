#include "engine/cost_model.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/rank_runner.h"

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
    const double slices = std::ceil(tokens / static_cast<double>(kSliceTokens));
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

// Of a Q or O chunk of `chunk` tokens, or a KV chunk of `kv_chunk`.
double TransferSeconds(const ModelShape& model, const PoolSpeed& speed, int64_t chunk, int64_t kv_chunk,
                       DType partial_dtype, CommKind comm) {
  const auto seconds = [&speed](int64_t bytes) {
    return speed.link_latency_seconds + static_cast<double>(bytes) / speed.link_bytes_per_second;
  };
  switch (comm) {
    case CommKind::kNone:
      return 0;
    case CommKind::kRecvQ:
      return seconds(model.q_bytes(chunk));
    case CommKind::kRecvKv:
      return seconds(model.kv_bytes(kv_chunk));
    case CommKind::kSendO:
      return seconds(model.partial_bytes(chunk, partial_dtype));
  }
  return 0;
}

// How many blocks' time a transfer takes, rounded, and 1 to a·b. `model` and `layout` are those of one mesh.
OverlapCosts TransferBlocks(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                            Tile tile, DType partial_dtype, int64_t cached_tokens, double (*round)(double)) {
  const double windowed =
      BlockSeconds(model, speed, layout, model.sliding_window, cached_tokens) * model.windowed_layers;
  const double full =
      BlockSeconds(model, speed, layout, 0, cached_tokens) * (model.layers - model.windowed_layers);
  const double block_seconds = (windowed + full) / model.layers;
  const int64_t chunk = layout.LargestChunkTokens();
  const int64_t kv_chunk = KvLayout(layout, cached_tokens).LargestChunkTokens();
  const auto cost = [&](CommKind comm) {
    const double blocks =
        round(TransferSeconds(model, speed, chunk, kv_chunk, partial_dtype, comm) / block_seconds);
    return static_cast<int>(std::clamp<double>(blocks, 1, tile.ranks()));
  };
  return {.c_q = cost(CommKind::kRecvQ), .c_kv = cost(CommKind::kRecvKv), .c_o = cost(CommKind::kSendO)};
}

// The most bytes of partial outputs that are alive at once in one layer, over all ranks. For each u, Q#u of
// all ranks are all chunks of the prompt, so that a live row of the tile is one O of the whole prompt; the
// schedule says which rows live: from a row's first block, or from the arrival of a partial that is adopted,
// to the end of the Send O that carries it away. In a narrower dtype the message lives beside the rows until
// it is merged. A rank that runs ahead of its neighbour adds the O that the neighbour has yet to take.
int64_t PartialPeakBytes(const ModelShape& model, int64_t tokens, const Schedule& schedule,
                         DType partial_dtype) {
  const int64_t row_bytes = model.partial_bytes(tokens, DType::kF32);
  const int64_t message_bytes = model.partial_bytes(tokens, partial_dtype);
  const bool adopt = partial_dtype == DType::kF32;
  const int a = schedule.tile.a;
  std::vector<bool> begun(a, false);
  std::vector<bool> arrived(a, false);  // a message in a narrower dtype waits for its row's first block
  int64_t live = 0;
  int64_t peak = 0;
  int sent = 0;
  const auto add = [&](int64_t bytes) { peak = std::max(peak, live += bytes); };
  for (const Step& step : schedule.steps) {
    if (step.comm == CommKind::kSendO && !adopt) {
      add(message_bytes);
      live -= row_bytes;
    }
    for (const BlockIndex& block : step.blocks) {
      if (begun[block.u]) continue;
      begun[block.u] = true;
      add(row_bytes);
      if (arrived[block.u]) live -= message_bytes;
      arrived[block.u] = false;
    }
    if (step.comm != CommKind::kSendO) continue;
    const int row = (++sent + 1) % a;
    if (begun[row]) {
      live -= message_bytes;
    } else {
      (adopt ? begun : arrived)[row] = true;
    }
  }
  return peak;
}

// Activations of all ranks of one process at their peak, the attention of a layer: the residual stream, the
// RoPE tables and the slice buffers of each rank (rank_runner.h), which live throughout; Q and KV once each,
// since ranks share a chunk by reference however many hold it; and the partial outputs. With head groups, KV
// heads may be replicated, and the KV of tokens lives until the KV of heads is whole; the rest of the
// all-to-alls needs less than attention does, which holds an O in f32.
int64_t PeakBytes(const ModelShape& model, const TokenLayout& layout, int heads, const Schedule& schedule,
                  DType partial_dtype, int64_t cached_tokens) {
  const int64_t tokens = layout.tokens();
  const int64_t residual = tokens * model.hidden * 4;
  const int64_t rope_tables = tokens * model.head_dim * 4;  // cos and sin of head_dim/2 angles each
  const int64_t q_width = model.q_elements(1);
  const int64_t slice_width = model.hidden +
                              std::max(q_width + model.kv_elements(1), 2 * model.intermediate) +
                              std::max(q_width, model.intermediate);
  int64_t slice_tokens = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    slice_tokens += std::min(kSliceTokens, layout.ChunkTokens(rank));
  }
  const int64_t slices = slice_tokens * slice_width * static_cast<int64_t>(DTypeBytes(model.dtype));
  const int64_t kv = heads * model.HeadSlice(heads).kv_bytes(cached_tokens + tokens);
  const int64_t exchanged_kv = heads == 1 ? 0 : model.kv_bytes(cached_tokens + tokens);
  return residual + rope_tables + slices + model.q_bytes(tokens) + kv +
         std::max(PartialPeakBytes(model, tokens, schedule, partial_dtype), exchanged_kv);
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
CommBytes LargestLayerCommBytes(const ModelShape& model, const TokenLayout& layout, int heads, Tile tile,
                                DType partial_dtype, int64_t cached_tokens) {
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

OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                            int heads, Tile tile, DType partial_dtype, int64_t cached_tokens) {
  return TransferBlocks(model.HeadSlice(heads), speed, layout.Groups(heads), tile, partial_dtype,
                        cached_tokens, [](double blocks) { return std::ceil(blocks); });
}

OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                             int heads, Tile tile, DType partial_dtype, int64_t cached_tokens) {
  return TransferBlocks(model.HeadSlice(heads), speed, layout.Groups(heads), tile, partial_dtype,
                        cached_tokens, [](double blocks) { return std::floor(blocks); });
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

AttentionSeconds AttentionSecondsOf(const ModelShape& model, const PoolSpeed& speed,
                                    const TokenLayout& layout, int heads, Tile tile, DType partial_dtype,
                                    int64_t window, int64_t cached_tokens) {
  const ModelShape slice = model.HeadSlice(heads);
  const TokenLayout groups = layout.Groups(heads);
  const TokenLayout kv_layout = KvLayout(layout, cached_tokens);
  const int64_t chunk = groups.LargestChunkTokens();
  const int64_t kv_chunk = kv_layout.Groups(heads).LargestChunkTokens();
  const auto transfer = [&](CommKind comm) {
    return TransferSeconds(slice, speed, chunk, kv_chunk, partial_dtype, comm);
  };
  const auto rework = [&](int64_t bytes) {
    return static_cast<double>(bytes) / speed.merge_bytes_per_second;
  };
  AttentionSeconds seconds = {.block = BlockSeconds(slice, speed, groups, window, cached_tokens),
                              .recv_q = transfer(CommKind::kRecvQ),
                              .recv_kv = transfer(CommKind::kRecvKv),
                              .send_o = transfer(CommKind::kSendO),
                              .merge = rework(slice.partial_bytes(chunk, partial_dtype))};
  if (heads == 1) return seconds;
  const int64_t own_chunk = layout.LargestChunkTokens();
  const int64_t own_kv_chunk = kv_layout.LargestChunkTokens();
  const auto all_to_alls = [&](int count, int64_t bytes) {
    return count * speed.link_latency_seconds +
           static_cast<double>((heads - 1) * bytes) / speed.link_bytes_per_second;
  };
  seconds.to_heads =
      all_to_alls(3, slice.q_bytes(own_chunk) + slice.kv_bytes(own_kv_chunk));  // of Q, K and V
  seconds.to_tokens = all_to_alls(1, slice.q_bytes(own_chunk));
  seconds.reorder_to_heads = rework(slice.q_bytes(chunk) + slice.kv_bytes(kv_chunk));
  seconds.reorder_to_tokens = rework(slice.q_bytes(chunk));
  return seconds;
}

Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout, int heads,
                   const Schedule& schedule, DType partial_dtype, int64_t cached_tokens) {
  Prediction predicted;
  predicted.compute_seconds =
      speed.start_seconds + TokenWorkSeconds(model, speed, layout) + LmHeadSeconds(model, speed);
  const auto add_layers = [&](int layers, int64_t window) {
    if (layers == 0) return;
    const AttentionSeconds seconds =
        AttentionSecondsOf(model, speed, layout, heads, schedule.tile, partial_dtype, window, cached_tokens);
    predicted.compute_seconds += layers * seconds.Compute(schedule.tile);
    predicted.comm_wait_seconds += layers * seconds.Wait(schedule);
  };
  add_layers(model.layers - model.windowed_layers, 0);
  add_layers(model.windowed_layers, model.sliding_window);
  predicted.seconds = predicted.compute_seconds + predicted.comm_wait_seconds;

  predicted.comm_bytes =
      LargestLayerCommBytes(model, layout, heads, schedule.tile, partial_dtype, cached_tokens);
  predicted.comm_bytes.q *= model.layers;
  predicted.comm_bytes.kv *= model.layers;
  predicted.comm_bytes.o *= model.layers;
  predicted.comm_bytes.all_to_all *= model.layers;
  predicted.peak_bytes = PeakBytes(model, layout, heads, schedule, partial_dtype, cached_tokens);
  return predicted;
}

}  // namespace meshfill
