#include "engine/plan/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "engine/model/layer_shape.h"
#include "engine/plan/comm_bytes.h"
#include "engine/plan/exposed_exchange.h"
#include "engine/plan/layer_reach.h"
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

// What one block's visible pairs take. `model` has the heads of one mesh.
double BlockSeconds(const ModelShape& model, const PoolSpeed& speed, const BlockPairs& block) {
  if (block.largest_rows == 0) return 0;
  const auto seconds = [&](double pairs, double rows) {
    return PairFlops(model.q_heads, model.head_dim) * pairs / speed.attention_flops_per_second +
           model.q_heads * rows * speed.block_row_seconds;
  };
  return PoolSeconds(speed, seconds(block.largest, block.largest_rows), seconds(block.mean, block.mean_rows));
}

// What is local to a token, in one layer.
struct TokenWork {
  explicit TokenWork(const ModelShape& model) : flops(ProjectionFlopsPerToken(model) / model.layers) {
    share_before_attention = std::min(1.0, QkvFlops(model) / flops);
  }

  double Seconds(const PoolSpeed& speed, const PlanShape& shape) const {
    const auto slice_tokens = static_cast<double>(PlanSliceTokens(shape, speed.slice_tokens));
    const auto seconds = [&](double tokens) {
      return tokens * flops / speed.gemm_flops_per_second +
             std::ceil(tokens / slice_tokens) * speed.slice_seconds;
    };
    return PoolSeconds(speed, seconds(static_cast<double>(shape.layout.LargestChunkTokens())),
                       seconds(static_cast<double>(shape.layout.tokens()) / shape.layout.ranks()));
  }

  double flops;  // FLOPs of one token
  double share_before_attention;
};

// Seconds of the work that each token causes once per prefill (PoolSpeed::token_seconds).
double BeginSeconds(const PoolSpeed& speed, const TokenLayout& layout) {
  return PoolSeconds(speed, static_cast<double>(layout.LargestChunkTokens()) * speed.token_seconds,
                     static_cast<double>(layout.tokens()) / layout.ranks() * speed.token_seconds);
}

// Seconds in which the LM head's weights are read.
double LmHeadReadSeconds(const ModelShape& model, const PoolSpeed& speed) {
  return static_cast<double>(LmHeadBytes(model, model.dtype)) / speed.lm_head_bytes_per_second;
}

// Seconds of the LM head on one rank, while the others wait.
double LmHeadSeconds(const ModelShape& model, const PoolSpeed& speed) {
  return LmHeadFlops(model) / speed.gemm_flops_per_second / speed.lone_rank_speedup +
         LmHeadReadSeconds(model, speed);
}

double ProductSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return model.layers * TokenWork(model).Seconds(speed, shape) + BeginSeconds(speed, shape.layout) +
         LmHeadSeconds(model, speed);
}

// The number of flows that share a link tells how fast one of them is.
MessageSeconds SecondsOf(double bytes, const Link& link, const Link& shared_inside, const Link& shared_port) {
  const auto on = [bytes](const Link& shared) {
    return MessageSeconds::OnLink{.start = shared.latency_seconds,
                                  .moves = bytes / shared.bytes_per_second,
                                  .flows = 1 / shared.bytes_per_second};
  };
  return {.total = link.Seconds(bytes), .shared = {on(shared_inside), on(shared_port)}};
}

// What the messages of one mesh's layer take: of the largest chunk, and of each hop where these differ.
// `slice` has the heads of one mesh.
void AddTransfers(const ModelShape& slice, const LayerReach& reach, const PlanShape& shape,
                  AttentionSeconds& seconds) {
  const auto [a, b] = shape.tile;
  const auto of = [&](Traffic traffic, int64_t tokens) {
    if (tokens == 0 && !reach.sees_all()) return MessageSeconds{};
    const int64_t bytes = traffic == Traffic::kQ    ? slice.q_bytes(tokens)
                          : traffic == Traffic::kKv ? slice.kv_bytes(tokens)
                                                    : slice.partial_bytes(tokens, shape.partial_dtype);
    return SecondsOf(static_cast<double>(bytes), shape.links[traffic], shape.links.shared_inside[traffic],
                     shape.links.shared_port[traffic]);
  };
  // The first message is as long as any.
  seconds.transfer = {{Traffic::kQ, of(Traffic::kQ, reach.LargestQ(1))},
                      {Traffic::kKv, of(Traffic::kKv, reach.LargestKv(1))},
                      {Traffic::kO, of(Traffic::kO, reach.LargestQ(1))}};
  if (shape.kv_inner != 0) {
    const auto& [link, inside, port] = shape.links.kv_outer;
    seconds.kv_outer = SecondsOf(static_cast<double>(slice.kv_bytes(reach.LargestKv(1))), link, inside, port);
  }
  if (reach.sees_all()) return;
  for (int hop = 1; hop < a; ++hop) {
    seconds.by_hop[Traffic::kQ].push_back(of(Traffic::kQ, reach.LargestQ(hop)));
  }
  for (int hop = 1; hop < b; ++hop) {
    seconds.by_hop[Traffic::kKv].push_back(of(Traffic::kKv, reach.LargestKv(hop)));
  }
}

// The all-to-alls of the layers of a shape with head groups, in any slices.
class Exchanges {
 public:
  // `work`: of the model; null: for shapes that exchange at once alone.
  Exchanges(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape, const TokenWork* work)
      : speed_(speed),
        link_(shape.links[Traffic::kAllToAll]),
        layers_(model.layers),
        others_(shape.heads - 1),
        work_(work) {
    const ModelShape one = model.HeadSlice(shape.heads);
    const int64_t tokens = shape.layout.LargestChunkTokens();
    const int64_t keys = KvLayout(shape.layout, shape.cached_tokens).LargestChunkTokens();
    q_bytes_ = one.q_bytes(tokens);
    kv_bytes_ = one.kv_bytes(tokens);
    prefix_bytes_ = one.kv_bytes(keys - tokens);
  }

  // Q, K and V go to heads, and the outputs back.
  void AddTo(const PlanShape& shape, AttentionSeconds& seconds) const {
    const int slices = shape.exchanges();
    if (slices == 1) {
      seconds.to_heads = seconds.to_heads_wait = AllToAlls(3, q_bytes_ + kv_bytes_ + prefix_bytes_);
      seconds.to_tokens = seconds.to_tokens_wait = AllToAlls(1, q_bytes_);
      return;
    }
    const ExchangeSeconds between = {.slices = slices,
                                     .arrives = AllToAlls(slices, q_bytes_) / slices,
                                     .prefix = prefix_bytes_ == 0 ? 0 : AllToAlls(2, prefix_bytes_),
                                     .leaves = AllToAlls(3 * slices, q_bytes_ + kv_bytes_) / slices};
    seconds.to_heads = between.prefix + slices * between.leaves;
    seconds.to_tokens = slices * between.arrives;
    ExchangeSeconds first = between, last = between;
    first.arrives = 0;
    last.prefix = last.leaves = 0;
    const double work = work_->Seconds(speed_, shape), before = work_->share_before_attention * work;
    const ExposedSeconds exposed = ExposedOf(between, work);
    const auto mean = [this](double inner, double outer) {
      return ((layers_ - 1) * inner + outer) / layers_;
    };
    seconds.to_heads_wait = mean(exposed.to_heads, ExposedOf(first, before).to_heads);
    seconds.to_tokens_wait = mean(exposed.to_tokens, ExposedOf(last, work - before).to_tokens);
  }

  // What the slices change of a layer's seconds.
  double LayerSeconds(const PlanShape& shape) const {
    AttentionSeconds seconds;
    AddTo(shape, seconds);
    return seconds.to_heads_wait + seconds.to_tokens_wait + work_->Seconds(speed_, shape);
  }

 private:
  double AllToAlls(int count, int64_t bytes) const {
    return count * link_.latency_seconds + static_cast<double>(others_ * bytes) / link_.bytes_per_second;
  }

  const PoolSpeed& speed_;
  const Link link_;
  const int layers_;
  const int others_;  // members of a head group
  const TokenWork* const work_;
  int64_t q_bytes_ = 0;  // Q of the prompt's tokens, to one member
  int64_t kv_bytes_ = 0;
  int64_t prefix_bytes_ = 0;
};

void AddExchanges(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                  AttentionSeconds& seconds) {
  if (shape.heads == 1) return;
  if (shape.exchanges() == 1) return Exchanges(model, speed, shape, nullptr).AddTo(shape, seconds);
  const TokenWork work(model);
  Exchanges(model, speed, shape, &work).AddTo(shape, seconds);
}

// All but the blocks, of which each takes nothing, and the all-to-alls.
AttentionSeconds WithoutBlocks(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                               const LayerReach& reach) {
  const ModelShape slice = model.HeadSlice(shape.heads);
  const auto rework = [&](int64_t bytes) {
    return static_cast<double>(bytes) / speed.merge_bytes_per_second;
  };
  const int64_t chunk = reach.q_layout().LargestChunkTokens();
  AttentionSeconds seconds = {.tile = shape.tile, .kv_inner = shape.kv_inner};
  AddTransfers(slice, reach, shape, seconds);
  if (reach.LargestQ(1) > 0) seconds.merge = rework(slice.partial_bytes(chunk, shape.partial_dtype));
  if (shape.heads == 1) return seconds;
  const int64_t kv_chunk = reach.kv_layout().LargestChunkTokens();
  seconds.reorder_to_heads = rework(slice.q_bytes(chunk) + slice.kv_bytes(kv_chunk));
  seconds.reorder_to_tokens = rework(slice.q_bytes(chunk));
  return seconds;
}

// All but the all-to-alls.
AttentionSeconds MeshSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                             int64_t window) {
  const ModelShape slice = model.HeadSlice(shape.heads);
  const LayerReach reach(shape, window);
  const LayerPairs pairs(reach, shape.cached_tokens, window);
  AttentionSeconds seconds = WithoutBlocks(model, speed, shape, reach);
  if (pairs.alike()) {
    seconds.block = BlockSeconds(slice, speed, pairs.Of(0, 0));
    return seconds;
  }
  for (int u = 0; u < shape.tile.a; ++u) {
    for (int v = 0; v < shape.tile.b; ++v) {
      seconds.blocks.push_back(BlockSeconds(slice, speed, pairs.Of(u, v)));
    }
  }
  seconds.block = std::accumulate(seconds.blocks.begin(), seconds.blocks.end(), 0.0) / shape.tile.ranks();
  return seconds;
}

// At most AttentionSeconds' Compute and Wait of one layer under any schedule.
double LeastAttentionSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                             int64_t window, bool many_rings) {
  const LayerReach reach(shape, window);
  const LayerPairs pairs(reach, shape.cached_tokens, window);
  AttentionSeconds seconds = WithoutBlocks(model, speed, shape, reach);
  AddExchanges(model, speed, shape, seconds);
  const ModelShape slice = model.HeadSlice(shape.heads);
  const auto [a, b] = shape.tile;
  const double blocks = pairs.alike() ? shape.tile.ranks() * BlockSeconds(slice, speed, pairs.Of(0, 0))
                                      : BlockSeconds(slice, speed, pairs.LeastOfTile());
  double along_q = 0, along_kv = 0, along_outer = 0;
  std::array<double, kSharedLinks> moves{};
  const auto add = [&](const MessageSeconds& message, int times, double& along) {
    along += times * message.total;
    for (int link = 0; link < kSharedLinks; ++link) moves[link] += times * message.shared[link].moves;
  };
  add(seconds.MessageOf(Traffic::kO, 0).second, a - 1, along_q);
  if (reach.sees_all()) {
    add(seconds.transfer[Traffic::kQ], a - 1, along_q);
    const int outer_hops = shape.kv_inner == 0 ? 0 : b / shape.kv_inner - 1;
    add(seconds.transfer[Traffic::kKv], b - 1 - outer_hops, along_kv);
    add(seconds.kv_outer, outer_hops, along_outer);
  } else {
    for (int hop = 0; hop < a - 1; ++hop) add(seconds.MessageOf(Traffic::kQ, hop).second, 1, along_q);
    for (int hop = 0; hop < b - 1; ++hop) add(seconds.MessageOf(Traffic::kKv, hop).second, 1, along_kv);
  }
  const double transfers =
      many_rings ? std::max({along_q, along_kv, along_outer, *std::max_element(moves.begin(), moves.end())})
                 : along_q + along_kv + along_outer;
  return seconds.Compute() + blocks + seconds.to_heads_wait + seconds.to_tokens_wait +
         std::max(0.0, transfers - blocks);
}

// A block of the average layer, and the longest messages.
struct TypicalLayer {
  TypicalLayer(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
    model.ForEachWindow([&](int64_t window, int layers) {
      const AttentionSeconds layer = MeshSeconds(model, speed, shape, window);
      block += layers * layer.block;
      for (Traffic traffic : kPrefillTraffics) {
        const MessageSeconds& message = layer.transfer[traffic];
        if (message.total > transfer[traffic].total) transfer[traffic] = message;
      }
      kv_outer = layer.kv_outer;  // layers of a double ring send alike
    });
    block /= model.layers;
  }
  double block = 0;
  PerTraffic<MessageSeconds> transfer;
  MessageSeconds kv_outer;
};

// How many blocks' time a transfer takes, rounded, at most a·b; 1 for those that the tile has none of.
OverlapCosts TransferBlocks(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                            double (*round)(double)) {
  const TypicalLayer layer(model, speed, shape);
  const auto cost = [&](Traffic traffic, int chunks) {
    if (chunks == 1) return 1;
    const double blocks = round(layer.transfer[traffic].total / layer.block);
    return static_cast<int>(std::min<double>(blocks, shape.tile.ranks()));
  };
  return {.c_q = cost(Traffic::kQ, shape.tile.a),
          .c_kv = cost(Traffic::kKv, shape.tile.b),
          .c_o = cost(Traffic::kO, shape.tile.a)};
}

}  // namespace

int64_t BestExchangeTokens(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  // A slice below that is all starts, and each of a product's takes as long as one of twice as many tokens.
  constexpr int64_t kLeastTokens = 64;
  if (shape.heads == 1) return 0;
  const int64_t chunk = shape.layout.LargestChunkTokens();
  const auto round_up = [](int64_t tokens, int64_t to) { return (tokens + to - 1) / to * to; };
  const TokenWork work(model);
  const Exchanges exchanges(model, speed, shape, &work);
  PlanShape cut = shape;
  cut.exchange_tokens = 0;
  double least = exchanges.LayerSeconds(cut);
  int64_t best = 0;
  for (int slices = 2; slices <= kMostExchanges; slices *= 2) {
    int64_t tokens = round_up(chunk, int64_t{slices} * kLeastTokens) / slices;
    if (tokens > speed.slice_tokens) tokens = round_up(tokens, speed.slice_tokens);
    if (tokens >= chunk || tokens == cut.exchange_tokens) continue;
    cut.exchange_tokens = tokens;
    const double taken = exchanges.LayerSeconds(cut);
    if (taken >= least) continue;
    least = taken;
    best = tokens;
  }
  return best;
}

OverlapCosts OverlapCostsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return TransferBlocks(model, speed, shape, [](double blocks) { return std::max(1.0, std::ceil(blocks)); });
}

OverlapCosts CoveredBlocksOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return TransferBlocks(model, speed, shape,
                        [](double blocks) { return blocks < 0.5 ? 0.0 : std::max(1.0, std::floor(blocks)); });
}

RingSeconds RingSecondsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  const TypicalLayer layer(model, speed, shape);
  return {.block = layer.block,
          .q = layer.transfer[Traffic::kQ],
          .kv = layer.transfer[Traffic::kKv],
          .o = layer.transfer[Traffic::kO],
          .kv_outer = layer.kv_outer};
}

AttentionSeconds AttentionSecondsOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                                    int64_t window) {
  AttentionSeconds seconds = MeshSeconds(model, speed, shape, window);
  AddExchanges(model, speed, shape, seconds);
  return seconds;
}

Prediction PredictTime(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                       const Schedule& schedule) {
  Prediction predicted;
  PartSeconds& parts = predicted.parts;
  parts.fixed = speed.start_seconds;
  parts.products = ProductSeconds(model, speed, shape);
  model.ForEachWindow([&](int64_t window, int layers) {
    const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, window);
    parts.attention += layers * seconds.Compute();
    parts.transfers += layers * seconds.Transfers(schedule);
    predicted.comm_wait_seconds += layers * seconds.Wait(schedule);
  });
  parts.hidden = parts.transfers - predicted.comm_wait_seconds;
  predicted.compute_seconds = parts.fixed + parts.products + parts.attention;
  predicted.seconds = predicted.compute_seconds + predicted.comm_wait_seconds;
  return predicted;
}

void PredictMemory(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule, Prediction& predicted) {
  predicted.run_bytes = predicted.peak_bytes =
      PeakBytes(model, PlanSliceTokens(shape, speed.slice_tokens), shape, schedule);
}

double PassSeconds(const ModelShape& model, const PoolSpeed& speed) {
  return model.layers * speed.slice_seconds + LmHeadReadSeconds(model, speed);
}

double LeastSeconds(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                    bool many_rings) {
  double least = speed.start_seconds + ProductSeconds(model, speed, shape);
  model.ForEachWindow([&](int64_t window, int layers) {
    least += layers * LeastAttentionSeconds(model, speed, shape, window, many_rings);
  });
  return least;
}

Prediction Predict(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape,
                   const Schedule& schedule) {
  Prediction predicted = PredictTime(model, speed, shape, schedule);
  PredictMemory(model, speed, shape, schedule, predicted);
  predicted.comm_bytes = PrefillCommBytes(model, shape);
  return predicted;
}

}  // namespace meshfill
