#include "engine/plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/plan/comm_bytes.h"
#include "engine/plan/peak_bytes.h"

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

// Pairs of the prompt's queries with its own keys and those before it.
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

// Costs of one mesh, whose heads `model` has: its ranks are the head groups.
PlanShape MeshOf(const PlanShape& shape) {
  PlanShape mesh = shape;
  mesh.layout = shape.layout.Groups(shape.heads);
  mesh.heads = 1;
  return mesh;
}

// Costs of the longest chunk in one mesh.
PerTraffic<double> TransferSeconds(const ModelShape& model, const PlanShape& mesh) {
  const int64_t chunk = mesh.layout.LargestChunkTokens();
  const int64_t kv_chunk = KvLayout(mesh.layout, mesh.cached_tokens).LargestChunkTokens();
  const auto seconds = [&](Traffic traffic, int64_t bytes) {
    return std::pair(traffic, mesh.links[traffic].Seconds(static_cast<double>(bytes)));
  };
  return {seconds(Traffic::kQ, model.q_bytes(chunk)), seconds(Traffic::kKv, model.kv_bytes(kv_chunk)),
          seconds(Traffic::kO, model.partial_bytes(chunk, mesh.partial_dtype))};
}

// How many blocks' time a transfer takes, rounded, and 1 to a·b. `model` has the heads of one mesh.
OverlapCosts TransferBlocks(const ModelShape& model, const PoolSpeed& speed, const PlanShape& mesh,
                            double (*round)(double)) {
  const auto block_seconds = [&](int64_t window) {
    return BlockSeconds(model, speed, mesh.layout, window, mesh.cached_tokens);
  };
  double all_layers = 0;
  model.ForEachWindow([&](int64_t window, int layers) { all_layers += layers * block_seconds(window); });
  const double average = all_layers / model.layers;
  const PerTraffic<double> transfer = TransferSeconds(model, mesh);
  const auto cost = [&](Traffic traffic) {
    const double blocks = round(transfer[traffic] / average);
    return static_cast<int>(std::clamp<double>(blocks, 1, mesh.tile.ranks()));
  };
  return {.c_q = cost(Traffic::kQ), .c_kv = cost(Traffic::kKv), .c_o = cost(Traffic::kO)};
}

}  // namespace

OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return TransferBlocks(model.HeadSlice(shape.heads), speed, MeshOf(shape),
                        [](double blocks) { return std::ceil(blocks); });
}

OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return TransferBlocks(model.HeadSlice(shape.heads), speed, MeshOf(shape),
                        [](double blocks) { return std::floor(blocks); });
}

double AttentionSeconds::Transfer(std::optional<Traffic> comm) const {
  return comm.has_value() ? transfer[*comm] : 0;
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
  const double transfers =
      (tile.a - 1) * (transfer[Traffic::kQ] + transfer[Traffic::kO]) + (tile.b - 1) * transfer[Traffic::kKv];
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
                              .transfer = TransferSeconds(slice, mesh),
                              .merge = rework(slice.partial_bytes(chunk, shape.partial_dtype))};
  if (shape.heads == 1) return seconds;
  const TokenLayout kv_layout = KvLayout(shape.layout, shape.cached_tokens);
  const int64_t own_q_bytes = slice.q_bytes(shape.layout.LargestChunkTokens());
  const int64_t own_kv_bytes = slice.kv_bytes(kv_layout.LargestChunkTokens());
  const auto all_to_alls = [&](int count, int64_t bytes) {
    const Link& link = shape.links[Traffic::kAllToAll];
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
  Prediction predicted;
  predicted.compute_seconds = SecondsBesideAttention(model, speed, shape.layout);
  model.ForEachWindow([&](int64_t window, int layers) {
    const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, window);
    predicted.compute_seconds += layers * seconds.Compute(schedule.tile);
    predicted.comm_wait_seconds += layers * seconds.Wait(schedule);
  });
  predicted.seconds = predicted.compute_seconds + predicted.comm_wait_seconds;
  predicted.run_bytes = predicted.peak_bytes = PeakBytes(model, speed.slice_tokens, shape, schedule);
  return predicted;
}

double LeastSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  double least = SecondsBesideAttention(model, speed, shape.layout);
  model.ForEachWindow([&](int64_t window, int layers) {
    const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, window);
    least += layers * (seconds.Compute(shape.tile) + seconds.LeastWait(shape.tile));
  });
  return least;
}

Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule) {
  Prediction predicted = PredictTimeAndMemory(model, speed, shape, schedule);
  predicted.comm_bytes = PrefillCommBytes(model, shape);
  return predicted;
}

}  // namespace meshfill
