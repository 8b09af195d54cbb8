#include "engine/cost_model.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/rank_runner.h"

namespace meshfill {
namespace {

// Visible pairs of a heavy block, for which the ranks wait in lockstep. Striped and zigzag layouts deal every
// block the same share of the prompt's pairs; under the contiguous one, every step has some rank at a block
// that sees all.
double BlockPairs(const TokenLayout& layout, int64_t window) {
  const double chunk = static_cast<double>(layout.LargestChunkTokens());
  if (layout.kind() == LayoutKind::kContiguous && layout.ranks() > 1) {
    return chunk * (window == 0 ? chunk : std::min(chunk, static_cast<double>(window)));
  }
  const double share = chunk / static_cast<double>(layout.tokens());
  return VisiblePairs(layout.tokens(), window) * share * share;
}

double BlockSeconds(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                    int64_t window) {
  return 4.0 * model.head_dim * model.q_heads * BlockPairs(layout, window) / speed.attention_flops_per_second;
}

// Of a chunk of `chunk` tokens.
double TransferSeconds(const ModelShape& model, const PoolSpeed& speed, int64_t chunk, DType partial_dtype,
                       CommKind comm) {
  const auto seconds = [&speed](int64_t bytes) {
    return speed.link_latency_seconds + static_cast<double>(bytes) / speed.link_bytes_per_second;
  };
  switch (comm) {
    case CommKind::kNone:
      return 0;
    case CommKind::kRecvQ:
      return seconds(model.q_bytes(chunk));
    case CommKind::kRecvKv:
      return seconds(model.kv_bytes(chunk));
    case CommKind::kSendO:
      return seconds(model.partial_bytes(chunk, partial_dtype));
  }
  return 0;
}

// How many blocks' time a transfer takes, rounded, and 1 to a·b.
OverlapCosts TransferBlocks(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                            Tile tile, DType partial_dtype, double (*round)(double)) {
  const double windowed = BlockSeconds(model, speed, layout, model.sliding_window) * model.windowed_layers;
  const double full = BlockSeconds(model, speed, layout, 0) * (model.layers - model.windowed_layers);
  const double block_seconds = (windowed + full) / model.layers;
  const int64_t chunk = layout.LargestChunkTokens();
  const auto cost = [&](CommKind comm) {
    const double blocks = round(TransferSeconds(model, speed, chunk, partial_dtype, comm) / block_seconds);
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
// since ranks share a chunk by reference however many hold it; and the partial outputs.
int64_t PeakBytes(const ModelShape& model, const TokenLayout& layout, const Schedule& schedule,
                  DType partial_dtype) {
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
  return residual + rope_tables + slices + model.q_bytes(tokens) + model.kv_bytes(tokens) +
         PartialPeakBytes(model, tokens, schedule, partial_dtype);
}

// LayerCommBytes of the rank that sends most. A rank sends its groups' chunks but one of each kind, so that
// the groups' sums give all ranks' bytes in time O(n).
CommBytes LargestLayerCommBytes(const ModelShape& model, const TokenLayout& layout, Tile tile,
                                DType partial_dtype) {
  const Mesh mesh(tile);
  std::vector<int64_t> q_group_tokens(tile.b, 0);   // of ranks a·g … a·g + a−1
  std::vector<int64_t> kv_group_tokens(tile.a, 0);  // of ranks g, g + a, g + 2a …
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    q_group_tokens[rank / tile.a] += layout.ChunkTokens(rank);
    kv_group_tokens[rank % tile.a] += layout.ChunkTokens(rank);
  }
  CommBytes largest;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const int64_t q_tokens = q_group_tokens[rank / tile.a];
    const int64_t kv_tokens = kv_group_tokens[rank % tile.a];
    const int64_t last_q_tokens = layout.ChunkTokens(mesh.QChunk(rank, tile.a - 1));
    const int64_t last_kv_tokens = layout.ChunkTokens(mesh.KvChunk(rank, tile.b - 1));
    const CommBytes bytes = {.q = model.q_bytes(q_tokens - last_q_tokens),
                             .kv = model.kv_bytes(kv_tokens - last_kv_tokens),
                             .o = model.partial_bytes(q_tokens - layout.ChunkTokens(rank), partial_dtype)};
    if (bytes.total() > largest.total()) largest = bytes;
  }
  return largest;
}

}  // namespace

CommBytes LayerCommBytes(const ModelShape& model, const TokenLayout& layout, Tile tile, DType partial_dtype,
                         int rank) {
  const Mesh mesh(tile);
  CommBytes bytes;
  for (int u = 0; u < tile.a - 1; ++u) {  // Q#0 … Q#a−2 and O#1 … O#a−1 leave
    bytes.q += model.q_bytes(layout.ChunkTokens(mesh.QChunk(rank, u)));
    bytes.o += model.partial_bytes(layout.ChunkTokens(mesh.QChunk(rank, u + 1)), partial_dtype);
  }
  for (int v = 0; v < tile.b - 1; ++v) bytes.kv += model.kv_bytes(layout.ChunkTokens(mesh.KvChunk(rank, v)));
  return bytes;
}

OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                            Tile tile, DType partial_dtype) {
  return TransferBlocks(model, speed, layout, tile, partial_dtype,
                        [](double blocks) { return std::ceil(blocks); });
}

OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                             Tile tile, DType partial_dtype) {
  return TransferBlocks(model, speed, layout, tile, partial_dtype,
                        [](double blocks) { return std::floor(blocks); });
}

Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const TokenLayout& layout,
                   const Schedule& schedule, DType partial_dtype) {
  const int64_t chunk = layout.LargestChunkTokens();
  const Tile tile = schedule.tile;
  const double projections = static_cast<double>(chunk) * ProjectionFlopsPerToken(model) + LmHeadFlops(model);
  const double merged_bytes = static_cast<double>((tile.a - 1) * model.partial_bytes(chunk, partial_dtype));
  Prediction predicted;
  predicted.compute_seconds =
      projections / speed.gemm_flops_per_second + model.layers * merged_bytes / speed.merge_bytes_per_second;
  const auto transfer_seconds = [&](CommKind comm) {
    return TransferSeconds(model, speed, chunk, partial_dtype, comm);
  };
  const auto add_layers = [&](int layers, int64_t window) {
    if (layers == 0) return;
    const double block_seconds = BlockSeconds(model, speed, layout, window);
    predicted.compute_seconds += layers * (tile.ranks() * block_seconds);
    for (const Step& step : schedule.steps) {
      const double hidden = static_cast<double>(step.blocks.size()) * block_seconds;
      predicted.comm_wait_seconds += layers * std::max(0.0, transfer_seconds(step.comm) - hidden);
    }
  };
  add_layers(model.layers - model.windowed_layers, 0);
  add_layers(model.windowed_layers, model.sliding_window);
  predicted.seconds = predicted.compute_seconds + predicted.comm_wait_seconds;

  predicted.comm_bytes = LargestLayerCommBytes(model, layout, tile, partial_dtype);
  predicted.comm_bytes.q *= model.layers;
  predicted.comm_bytes.kv *= model.layers;
  predicted.comm_bytes.o *= model.layers;
  predicted.peak_bytes = PeakBytes(model, layout, schedule, partial_dtype);
  return predicted;
}

}  // namespace meshfill
