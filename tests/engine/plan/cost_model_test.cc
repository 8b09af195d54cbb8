#include "engine/plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/model/layer_shape.h"
#include "engine/plan/exposed_exchange.h"
#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"

namespace meshfill {
namespace {

constexpr double kAtOnce = std::numeric_limits<double>::infinity();

ModelShape Model() {
  return {.layers = 4,
          .hidden = 512,
          .intermediate = 1024,
          .q_heads = 8,
          .kv_heads = 8,
          .head_dim = 64,
          .vocab = 1000,
          .context_tokens = 1 << 20,
          .dtype = DType::kBf16};
}

// A pool that takes time for nothing.
PoolSpeed Instant() {
  return {.gemm_flops_per_second = kAtOnce,
          .attention_flops_per_second = kAtOnce,
          .merge_bytes_per_second = kAtOnce,
          .link_bytes_per_second = kAtOnce,
          .link_latency_seconds = 0};
}

PlanShape Shape(LayoutKind kind, int64_t tokens, Tile tile, int heads = 1, int64_t stripe = 64,
                const PoolSpeed& speed = Instant()) {
  return {.layout = TokenLayout::Make(kind, heads * tile.ranks(), tokens, stripe).value(),
          .heads = heads,
          .tile = tile,
          .links = Links::Alike(speed.link())};
}

Prediction TimeOf(const ModelShape& model, const PoolSpeed& speed, const PlanShape& shape) {
  return PredictTime(model, speed, shape, GreedySchedule(shape.tile, {}));
}

TEST(PredictTime, CountsTheSliceThatIsNotWhole) {
  PoolSpeed speed = Instant();
  speed.slice_tokens = 1024;
  speed.slice_seconds = 1e-3;
  const auto seconds = [&](int64_t tokens) {
    return TimeOf(Model(), speed, Shape(LayoutKind::kStriped, tokens, {1, 1})).seconds;
  };
  EXPECT_DOUBLE_EQ(seconds(1), 4 * 1e-3);
  EXPECT_DOUBLE_EQ(seconds(2048), 4 * 2e-3);
  EXPECT_DOUBLE_EQ(seconds(2049), 4 * 3e-3);
}

// However many tokens the backend computes at once elsewhere.
TEST(PredictTime, EachSliceOfAnExchangeStartsProducts) {
  PoolSpeed speed = Instant();
  speed.slice_tokens = 1024;
  speed.slice_seconds = 1e-3;
  PlanShape shape = Shape(LayoutKind::kStriped, 4096, {1, 1}, 4);
  EXPECT_DOUBLE_EQ(TimeOf(Model(), speed, shape).parts.products, 4 * 1e-3);
  shape.exchange_tokens = 256;
  EXPECT_DOUBLE_EQ(TimeOf(Model(), speed, shape).parts.products, 4 * 4e-3);
}

TEST(PredictTime, CountsWhatEachPartOfAPrefillCosts) {
  const ModelShape model = Model();
  const PlanShape three = Shape(LayoutKind::kContiguous, 1000, {1, 3});  // chunks of 334, 334 and 332
  const auto taken = [&](double PoolSpeed::*field, double value, const PlanShape& shape) {
    PoolSpeed speed = Instant();
    speed.*field = value;
    return TimeOf(model, speed, shape);
  };
  EXPECT_DOUBLE_EQ(taken(&PoolSpeed::token_seconds, 1e-3, three).parts.products, 0.334);
  EXPECT_DOUBLE_EQ(taken(&PoolSpeed::start_seconds, 0.25, three).parts.fixed, 0.25);
  EXPECT_DOUBLE_EQ(taken(&PoolSpeed::start_seconds, 0.25, three).seconds, 0.25);
  EXPECT_DOUBLE_EQ(taken(&PoolSpeed::lm_head_bytes_per_second, 1e6, three).parts.products,
                   1000.0 * 512 * 2 / 1e6);
  const PlanShape one = Shape(LayoutKind::kStriped, 1000, {1, 1});
  EXPECT_DOUBLE_EQ(taken(&PoolSpeed::block_row_seconds, 1e-6, one).parts.attention,
                   4 * 8 * 1000 * 1e-6);  // layers, heads, queries
  const double flops = ProjectionFlopsPerToken(model);
  EXPECT_DOUBLE_EQ(taken(&PoolSpeed::gemm_flops_per_second, 1e9, three).parts.products,
                   (334 * flops + LmHeadFlops(model)) / 1e9);
}

// Two ranks of 200 and 100 tokens: the pool waits for the first, unless it speeds up once it is alone.
TEST(PredictTime, ARankThatIsAloneSpeedsUpWhereRanksShareCores) {
  ModelShape model = Model();
  model.vocab = 1;
  PoolSpeed speed = Instant();
  speed.gemm_flops_per_second = 1e6;
  const PlanShape uneven = Shape(LayoutKind::kStriped, 300, {1, 2}, 1, 200);
  const auto tokens = [&](double lone_rank_speedup) {
    speed.lone_rank_speedup = lone_rank_speedup;
    const double lm_head = LmHeadFlops(model) / 1e6 / lone_rank_speedup;
    return (TimeOf(model, speed, uneven).seconds - lm_head) * 1e6 / ProjectionFlopsPerToken(model);
  };
  EXPECT_NEAR(tokens(1), 200, 1e-6);
  EXPECT_NEAR(tokens(2), 150, 1e-6);
}

TEST(PredictTime, WaitsAndWhatIsHiddenAreAllTransfers) {
  PoolSpeed speed = Instant();
  speed.attention_flops_per_second = 1e10;
  speed.link_bytes_per_second = 1e9;
  const Prediction predicted =
      TimeOf(Model(), speed, Shape(LayoutKind::kStriped, 4096, {2, 2}, 1, 64, speed));
  ASSERT_GT(predicted.comm_wait_seconds, 0);
  ASSERT_GT(predicted.parts.hidden, 0);
  EXPECT_DOUBLE_EQ(predicted.parts.hidden + predicted.comm_wait_seconds, predicted.parts.transfers);
  EXPECT_DOUBLE_EQ(predicted.seconds, predicted.parts.attention + predicted.comm_wait_seconds);
}

// Once links are found to be slower, all transfers take longer, hidden or not.
TEST(PredictTime, SlicesHideAPartOfTheSameTransfers) {
  PoolSpeed speed = Instant();
  speed.gemm_flops_per_second = 1e12;
  speed.link_bytes_per_second = 1e9;
  PlanShape shape = Shape(LayoutKind::kStriped, 4096, {1, 1}, 4, 64, speed);
  const Prediction at_once = TimeOf(Model(), speed, shape);
  shape.exchange_tokens = 256;
  const Prediction in_slices = TimeOf(Model(), speed, shape);
  EXPECT_LT(in_slices.comm_wait_seconds, 0.9 * at_once.comm_wait_seconds);
  EXPECT_NEAR(in_slices.parts.transfers, at_once.parts.transfers, 1e-9);
}

// Where nothing can be hidden, or all is, the bound is what a shape takes.
TEST(LeastSeconds, AreReachedWhereTheScheduleChangesNothing) {
  PoolSpeed computes = Instant(), sends = Instant();
  computes.gemm_flops_per_second = computes.attention_flops_per_second = 1e10;
  computes.merge_bytes_per_second = 1e9;
  computes.slice_seconds = computes.token_seconds = computes.start_seconds = 1e-3;
  computes.block_row_seconds = 1e-8;
  sends.link_bytes_per_second = 1e8;
  sends.link_latency_seconds = 1e-4;
  for (const PoolSpeed& speed : {computes, sends}) {
    for (const int64_t window : {0, 150}) {
      ModelShape model = Model();
      if (window > 0) SetWindow(model, window, 2);
      for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kContiguous}) {
        for (const int heads : {1, 2}) {
          for (const Tile tile : {Tile{1, 1}, Tile{1, 4}, Tile{4, 1}, Tile{2, 3}}) {
            const PlanShape shape = Shape(kind, 4099, tile, heads, 64, speed);
            const double taken = TimeOf(model, speed, shape).seconds;
            SCOPED_TRACE(shape.DebugString());
            EXPECT_LE(LeastSeconds(model, speed, shape), taken * (1 + 1e-9));
            if (window > 0 && speed == computes) continue;  // blocks differ: their means count
            EXPECT_NEAR(LeastSeconds(model, speed, shape), taken, 1e-9 * taken);
          }
        }
      }
    }
  }
}

TEST(AttentionSecondsOf, OTravelsInItsOwnDType) {
  PoolSpeed speed = Instant();
  speed.link_bytes_per_second = 1e9;
  speed.link_latency_seconds = 1e-3;
  PlanShape shape = Shape(LayoutKind::kStriped, 4096, {2, 2}, 1, 64, speed);
  const auto o_seconds = [&](DType dtype) {
    shape.partial_dtype = dtype;
    return AttentionSecondsOf(Model(), speed, shape, 0).transfer[Traffic::kO].total;
  };
  EXPECT_DOUBLE_EQ(o_seconds(DType::kF32), 1e-3 + 1024 * 8 * (64 * 4 + 4) / 1e9);
  EXPECT_DOUBLE_EQ(o_seconds(DType::kBf16), 1e-3 + 1024 * 8 * (64 * 2 + 4) / 1e9);
}

TEST(AttentionSecondsOf, MergesAndReordersAreBytesOfMemory) {
  PoolSpeed speed = Instant();
  speed.merge_bytes_per_second = 1e9;
  const AttentionSeconds mesh =
      AttentionSecondsOf(Model(), speed, Shape(LayoutKind::kStriped, 4096, {2, 2}), 0);
  EXPECT_DOUBLE_EQ(mesh.merge, 1024 * 8 * (64 * 4 + 4) / 1e9);
  EXPECT_DOUBLE_EQ(mesh.Compute(), mesh.merge);  // one O arrives at each rank
  const AttentionSeconds groups =
      AttentionSecondsOf(Model(), speed, Shape(LayoutKind::kStriped, 4096, {1, 1}, 4), 0);
  const double q_of_a_group = 4096 * 2 * 64 * 2;  // a quarter of the heads of four chunks
  EXPECT_DOUBLE_EQ(groups.reorder_to_heads, 3 * q_of_a_group / 1e9);
  EXPECT_DOUBLE_EQ(groups.reorder_to_tokens, q_of_a_group / 1e9);
}

// Four contiguous chunks of 100 tokens and a window of 150: a rank sees all of its chunk and of the one
// before but what is 150 or more away, and 49 keys of the one before that.
TEST(AttentionSecondsOf, AContiguousLayoutSeesItsWindowAlone) {
  ModelShape model = Model();
  SetWindow(model, 150, model.layers);
  PoolSpeed speed = Instant();
  speed.attention_flops_per_second = PairFlops(8, 64);  // a pair a second
  speed.link_bytes_per_second = 2 * 8 * 64 * 2;         // a token's K and V a second
  const PlanShape shape = Shape(LayoutKind::kContiguous, 400, {1, 4}, 1, 64, speed);
  const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, 150);
  ASSERT_EQ(seconds.blocks.size(), 4u);
  std::vector<double> pairs;
  for (int v = 0; v < 4; ++v) {
    int64_t visible = 0;
    for (int query = 0; query < 100; ++query) {
      for (int key = 0; key < 100; ++key) {
        const int distance = 100 * v + query - key;
        visible += distance >= 0 && distance < 150 ? 1 : 0;
      }
    }
    EXPECT_DOUBLE_EQ(seconds.blocks[v], static_cast<double>(visible)) << "block " << v;
  }
  std::vector<double> keys;
  for (const MessageSeconds& message : seconds.by_hop[Traffic::kKv]) keys.push_back(message.total);
  EXPECT_EQ(keys, (std::vector<double>{100, 49, 0}));
}

// Q, K and V of the prompt and of 1,024 cached tokens go to three others, each after the start of a message.
TEST(AttentionSecondsOf, AnExchangeMovesThePrefixToo) {
  PoolSpeed speed = Instant();
  speed.link_bytes_per_second = 1e6;
  speed.link_latency_seconds = 0.5;
  PlanShape shape = Shape(LayoutKind::kStriped, 4096, {1, 1}, 4, 64, speed);
  const double q = 1024 * 2 * 64 * 2, kv = 2 * q;  // to one member
  const auto to_heads = [&](int64_t cached_tokens) {
    shape.cached_tokens = cached_tokens;
    const AttentionSeconds seconds = AttentionSecondsOf(Model(), speed, shape, 0);
    EXPECT_DOUBLE_EQ(seconds.to_heads_wait, seconds.to_heads);
    EXPECT_DOUBLE_EQ(seconds.to_tokens_wait, 0.5 + 3 * q / 1e6);
    EXPECT_DOUBLE_EQ(seconds.Wait(GreedySchedule({1, 1}, {})), seconds.to_heads + seconds.to_tokens);
    return seconds.to_heads;
  };
  EXPECT_DOUBLE_EQ(to_heads(0), 3 * 0.5 + 3 * (q + kv) / 1e6);
  EXPECT_DOUBLE_EQ(to_heads(1024), 3 * 0.5 + 3 * (q + kv + kv / 4) / 1e6);
}

// Two chunks of 200 and 100 tokens: all wait for the half of the heads of the longer one.
TEST(AttentionSecondsOf, AnExchangeTakesAsLongAsThatOfTheLongestChunk) {
  PoolSpeed speed = Instant();
  speed.link_bytes_per_second = 1e6;
  const PlanShape shape = Shape(LayoutKind::kStriped, 300, {1, 1}, 2, 200, speed);
  const AttentionSeconds seconds = AttentionSecondsOf(Model(), speed, shape, 0);
  const double q = 200 * 4 * 64 * 2;
  EXPECT_DOUBLE_EQ(seconds.to_heads, 3 * q / 1e6);
  EXPECT_DOUBLE_EQ(seconds.to_tokens, q / 1e6);
}

// In slices, the first layer has no outputs before it and the last one no products behind it.
TEST(AttentionSecondsOf, TheFirstAndTheLastLayerHideLess) {
  const double work = 4.0, q = 1024 * 2 * 64 * 2;
  for (const int layers : {1, 2, 4}) {
    ModelShape model = Model();
    model.layers = layers;
    PoolSpeed speed = Instant();
    speed.slice_tokens = 256;
    speed.link_bytes_per_second = 3 * q;  // an outgoing slice of Q: a quarter of a second
    speed.gemm_flops_per_second = 1024 * ProjectionFlopsPerToken(model) / layers / work;
    PlanShape shape = Shape(LayoutKind::kStriped, 4096, {1, 1}, 4, 64, speed);
    shape.exchange_tokens = 256;
    const AttentionSeconds seconds = AttentionSecondsOf(model, speed, shape, 0);
    const ExchangeSeconds inner = {.slices = 4, .arrives = 0.25, .prefix = 0, .leaves = 0.75};
    ExchangeSeconds first = inner, last = inner;
    first.arrives = last.leaves = 0;
    const double before = work * QkvFlops(model) / (ProjectionFlopsPerToken(model) / layers);
    EXPECT_NEAR(seconds.to_heads_wait,
                ((layers - 1) * ExposedOf(inner, work).to_heads + ExposedOf(first, before).to_heads) / layers,
                1e-9);
    EXPECT_NEAR(
        seconds.to_tokens_wait,
        ((layers - 1) * ExposedOf(inner, work).to_tokens + ExposedOf(last, work - before).to_tokens) / layers,
        1e-9);
    EXPECT_NEAR(seconds.to_heads + seconds.to_tokens, 4 * (0.25 + 0.75), 1e-9);
  }
}

// Three layers of four send 99 keys of a chunk of 1,000, the other one all of them.
TEST(RingSecondsOf, TheLongestMessageOfAnyLayerIsPlannedFor) {
  ModelShape model = Model();
  SetWindow(model, 100, 3);
  PoolSpeed speed = Instant();
  speed.link_bytes_per_second = static_cast<double>(model.kv_bytes(1));  // a token's K and V a second
  const PlanShape shape = Shape(LayoutKind::kContiguous, 4000, {1, 4}, 1, 64, speed);
  EXPECT_DOUBLE_EQ(AttentionSecondsOf(model, speed, shape, 100).transfer[Traffic::kKv].total, 99);
  EXPECT_DOUBLE_EQ(RingSecondsOf(model, speed, shape).kv.total, 1000);
}

// A slice of an exchange is a multiple of those that are computed, or one of them.
TEST(BestExchangeTokens, AreWholeSlices) {
  int longer = 0;
  for (const int64_t slice_tokens : {100, 192, 1000}) {
    for (const int64_t tokens : {1000, 5000, 20000, 100'000}) {
      PoolSpeed speed = Instant();
      speed.slice_tokens = slice_tokens;
      speed.gemm_flops_per_second = 1e9;
      speed.link_bytes_per_second = 1e6;
      const PlanShape shape = Shape(LayoutKind::kStriped, tokens, {1, 1}, 4, 64, speed);
      const int64_t best = BestExchangeTokens(Model(), speed, shape);
      EXPECT_LT(best, shape.layout.LargestChunkTokens());
      if (best > slice_tokens) {
        EXPECT_EQ(best % slice_tokens, 0) << tokens << " tokens in slices of " << slice_tokens;
        ++longer;
      }
    }
  }
  EXPECT_GT(longer, 0);
}

// A step waits for what is left of its message. Of two that end together, the second has come meanwhile.
TEST(AttentionSeconds, AWaitDelaysWhatFollows) {
  AttentionSeconds seconds = {.tile = {2, 2}, .block = 1};
  seconds.transfer[Traffic::kQ].total = 4;
  seconds.transfer[Traffic::kKv].total = 2;
  Schedule schedule = {.tile = {2, 2}};
  schedule.steps = {{.comm = Traffic::kQ, .blocks = {{0, 0}}, .spans = 2},
                    {.comm = Traffic::kKv, .blocks = {{1, 0}}}};
  EXPECT_DOUBLE_EQ(seconds.Wait(schedule), 2);
  EXPECT_DOUBLE_EQ(seconds.Transfers(schedule), 6);
}

}  // namespace
}  // namespace meshfill
