// Which mesh the planner takes for a prompt, and what it predicts.
#include "engine/plan/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "engine/plan/comm_bytes.h"
#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/plan/planner_inputs.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

TEST(OverlapCosts, AreTheLeastBlocksThatHideATransfer) {
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 16, 16384, 64);
  // One block: 1024 × 1024 / 2 pairs and some; one Q chunk: 1 MiB.
  const double block_flops = 4.0 * 64 * 8 * VisiblePairs(16384, 0) / 256;
  const PoolSpeed speed = {.gemm_flops_per_second = 1e12,
                           .attention_flops_per_second = block_flops / 1e-3,  // 1 ms a block
                           .link_bytes_per_second = 1 << 28,                  // 1 MiB in 3.90625 ms
                           .link_latency_seconds = 0};
  const auto costs_of = [&](const PoolSpeed& pool) {
    return OverlapCostsOf(model, pool,
                          {.layout = *layout, .tile = {.a = 4, .b = 4}, .links = Links::Alike(pool.link())});
  };
  const OverlapCosts costs = costs_of(speed);
  EXPECT_EQ(costs.c_q, 4);
  EXPECT_EQ(costs.c_kv, 2);  // half of Q's bytes at g = 4
  EXPECT_EQ(costs.c_o, 8);   // twice Q's bytes and the LSE: 7.9 ms
  const auto covered_of = [&](const PoolSpeed& pool) {
    return CoveredBlocksOf(model, pool,
                           {.layout = *layout, .tile = {.a = 4, .b = 4}, .links = Links::Alike(pool.link())});
  };
  EXPECT_EQ(covered_of(speed), (OverlapCosts{.c_q = 3, .c_kv = 1, .c_o = 7}));
  PoolSpeed faster = speed;
  faster.link_bytes_per_second *= 7;  // 0.56, 0.28 and 1.1 blocks
  EXPECT_EQ(covered_of(faster), (OverlapCosts{.c_q = 1, .c_kv = 0, .c_o = 1}));
  EXPECT_EQ(costs_of(faster), (OverlapCosts{.c_q = 1, .c_kv = 1, .c_o = 2}));
  PoolSpeed infinite = speed;
  infinite.link_bytes_per_second = 1e30;
  EXPECT_EQ(costs_of(infinite), OverlapCosts{});
  PoolSpeed crawling = speed;
  crawling.link_bytes_per_second = 1;
  EXPECT_EQ(costs_of(crawling).c_q, 16);
  const auto of_tile = [&](Tile tile) {
    return OverlapCostsOf(model, speed,
                          {.layout = *layout, .tile = tile, .links = Links::Alike(speed.link())});
  };
  EXPECT_EQ(of_tile({.a = 1, .b = 16}), (OverlapCosts{.c_q = 1, .c_kv = 2, .c_o = 1})) << "rows alone";
  EXPECT_EQ(of_tile({.a = 16, .b = 1}), (OverlapCosts{.c_q = 4, .c_kv = 1, .c_o = 8})) << "columns alone";
}

TEST(MakePlan, EqualHeadsAndASlowLinkTakeTheSquare) {  // §3.8: a → √n where ρ = 1, g = 1
  for (int root : {2, 3, 4, 6, 8}) {
    const auto choice =
        MakePlan(Llama(8, 8, DType::kBf16), kSlowLink,
                 {.tokens = 65536, .ranks = root * root, .heads = 1, .partial_dtype = DType::kBf16});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->plan.tile, (Tile{.a = root, .b = root}));
  }
}

TEST(MakePlan,
     GroupedHeadsFlattenTheTile) {  // a ≈ √(n / (g·(1+ρ)/2)): 64 ranks, g = 8, ρ = 1 → 2.8
  const auto choice = MakePlan(Llama(8, 1, DType::kBf16), kSlowLink,
                               {.tokens = 65536, .ranks = 64, .heads = 1, .partial_dtype = DType::kBf16});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_TRUE(choice->plan.tile.a == 2 || choice->plan.tile.a == 4) << choice->plan.DebugString();
}

TEST(MakePlan, AFastLinkHidesEverythingInARing) {
  const PoolSpeed fast = {.gemm_flops_per_second = 1e11,
                          .attention_flops_per_second = 1e11,
                          .link_bytes_per_second = 1e12,
                          .link_latency_seconds = 1e-6};
  const auto choice = MakePlan(Llama(8, 8, DType::kBf16), fast, {.tokens = 65536, .ranks = 8});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.tile.a, 1);
  EXPECT_EQ(choice->plan.predicted.comm_wait_seconds, 0);
  EXPECT_EQ(choice->plan.heads, 1);
  for (const PlanCandidate& candidate : choice->candidates) {  // the others merge
    if (candidate.heads > 1) continue;
    const double merges =
        4.0 * (candidate.tile.a - 1) * (8192.0 * 8 * (64 * 4 + 4)) / fast.merge_bytes_per_second;
    EXPECT_NEAR(candidate.predicted.compute_seconds, choice->plan.predicted.compute_seconds + merges, 1e-9);
  }
}

TEST(MakePlan, ListsEveryShapeBestFirst) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i);
    ModelShape model = Llama(8, 1 << Draw(random, 0, 3), Draw(random, 0, 1) ? DType::kBf16 : DType::kF32);
    if (Draw(random, 0, 1)) {
      SetWindow(model, Draw<int64_t>(random, 1, 3000), Draw(random, 1, model.layers));
    }
    const auto draw_speed = [&] { return std::exp2(Draw(random, 24, 44)); };
    const PoolSpeed speed = {.gemm_flops_per_second = draw_speed(),
                             .attention_flops_per_second = draw_speed(),
                             .merge_bytes_per_second = draw_speed(),
                             .link_bytes_per_second = draw_speed(),
                             .link_latency_seconds = 1e-6 * Draw(random, 0, 50)};
    const PlanRequest request = {.tokens = Draw<int64_t>(random, 1, 100000),
                                 .ranks = Draw(random, 1, 64),
                                 .layout = static_cast<LayoutKind>(Draw(random, 0, 2)),
                                 .partial_dtype = Draw(random, 0, 1) ? DType::kBf16 : DType::kF32};
    const auto choice = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok()) << choice.status();
    const auto& [plan, candidates, pieces, weights] = *choice;
    ASSERT_TRUE(pieces.empty());
    ASSERT_TRUE(CheckSchedule(plan.schedule).ok());
    ASSERT_EQ(plan.schedule.tile, plan.tile);
    ASSERT_EQ(plan.ranks(), request.ranks);
    ASSERT_EQ(plan.heads * plan.tile.ranks(), request.ranks);
    std::set<std::pair<int, int>> shapes;  // by heads and a
    for (const PlanCandidate& candidate : candidates) {
      ASSERT_EQ(candidate.heads * candidate.tile.ranks(), request.ranks);
      shapes.emplace(candidate.heads, candidate.tile.a);
    }
    size_t all_shapes = 0;  // 8 query heads and 1 to 8 KV heads: every power of two divides as it must
    for (int h : {1, 2, 4, 8}) all_shapes += request.ranks % h == 0 ? TilesOf(request.ranks / h).size() : 0;
    ASSERT_EQ(shapes.size(), all_shapes);
    ASSERT_EQ(candidates.size(), all_shapes);
    ASSERT_EQ(candidates.front().tile, plan.tile);
    ASSERT_EQ(candidates.front().heads, plan.heads);
    int64_t most_bytes = 0;
    for (int rank = 0; rank < request.ranks; ++rank) {
      most_bytes = std::max(most_bytes, RankCommBytes(model, plan, rank).total());
    }
    ASSERT_EQ(plan.predicted.comm_bytes.total(), most_bytes);
    for (size_t c = 0; c < candidates.size(); ++c) {
      const Prediction& predicted = candidates[c].predicted;
      ASSERT_GT(predicted.compute_seconds, 0);
      ASSERT_GE(predicted.comm_wait_seconds, 0);
      ASSERT_DOUBLE_EQ(predicted.seconds, predicted.compute_seconds + predicted.comm_wait_seconds);
      // Moving one rank's bytes takes no longer than what is hidden and what is waited for.
      ASSERT_LE(static_cast<double>(predicted.comm_bytes.total()) / speed.link_bytes_per_second,
                predicted.seconds * (1 + 1e-9));
      ASSERT_GE(predicted.seconds, candidates[std::max<size_t>(c, 1) - 1].predicted.seconds);
    }
  }
}

// A pool that takes time for nothing ties all shapes: fewer bytes come first, then less memory.
TEST(MakePlan, OrdersShapesThatTieByTheirBytesAndMemory) {
  constexpr double kAtOnce = std::numeric_limits<double>::infinity();
  const PoolSpeed instant = {.gemm_flops_per_second = kAtOnce,
                             .attention_flops_per_second = kAtOnce,
                             .merge_bytes_per_second = kAtOnce,
                             .link_bytes_per_second = kAtOnce,
                             .link_latency_seconds = 0};
  const auto choice = MakePlan(Llama(8, 2, DType::kBf16), instant, {.tokens = 65536, .ranks = 16});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const auto order = [](const PlanCandidate& candidate) {
    return std::tuple(candidate.predicted.seconds, candidate.predicted.comm_bytes.total(),
                      candidate.predicted.run_bytes, candidate.heads, candidate.tile.a);
  };
  ASSERT_GT(choice->candidates.size(), 4u);
  for (size_t c = 1; c < choice->candidates.size(); ++c) {
    EXPECT_EQ(choice->candidates[c].predicted.seconds, choice->candidates[0].predicted.seconds);
    EXPECT_LT(order(choice->candidates[c - 1]), order(choice->candidates[c]));
  }
}

TEST(MakePlan, PredictsOneRankExactly) {
  ModelShape model = Llama(8, 2, DType::kF32);
  SetWindow(model, 100, 3);
  const PoolSpeed speed = {.gemm_flops_per_second = 2e9, .attention_flops_per_second = 3e9};
  const auto choice = MakePlan(model, speed, {.tokens = 5000, .ranks = 1});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const double attention = AttentionFlops(model, 5000);
  EXPECT_NEAR(choice->plan.predicted.seconds, attention / 3e9 + (ModelFlops(model, 5000) - attention) / 2e9,
              1e-9);
  EXPECT_EQ(choice->plan.predicted.comm_wait_seconds, 0);
  EXPECT_EQ(choice->plan.predicted.comm_bytes, CommBytes{});
}

// Three ranks on two cores: two at first and then one, where a layer is over before the scheduler changes
// threads.
TEST(MakePlan, RanksThatShareCoresUnevenlyTakeTurns) {
  ModelShape model = Llama(8, 8, DType::kBf16);
  model.vocab = 1;
  const auto compute_seconds = [&](double lone_rank_speedup, int64_t tokens, double flops_per_second) {
    PoolSpeed speed = kSlowLink;
    speed.gemm_flops_per_second = speed.attention_flops_per_second = flops_per_second;
    speed.lone_rank_speedup = lone_rank_speedup;
    const auto choice =
        MakePlan(model, speed, {.tokens = tokens, .ranks = 3, .stripe = 1, .tile = Tile{1, 3}});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice->plan.predicted.compute_seconds;
  };
  const double shared = compute_seconds(1, 3000, 1e12);
  EXPECT_NEAR(compute_seconds(1.5, 3000, 1e12), shared * 4 / 3, 0.01 * shared);  // 2 turns instead of 1.5
  EXPECT_NEAR(compute_seconds(2, 3000, 1e12), shared, 0.01 * shared);            // even turns

  const double long_shared = compute_seconds(1, 300'000, 1e10);
  const double long_turns = compute_seconds(1.5, 300'000, 1e10);
  EXPECT_GT(long_turns, long_shared);
  EXPECT_LT(long_turns, 1.001 * long_shared);  // time slices share the cores out
}

// T queries after P cached tokens do what P + T do less what P do, and move P + T keys.
TEST(MakePlan, CountsACachedPrefix) {
  std::mt19937_64 random(TestSeed());
  PoolSpeed speed = kSlowLink;
  speed.gemm_flops_per_second = 1e30;  // attention alone
  speed.attention_flops_per_second = 1e12;
  for (int draw = 0; draw < 100; ++draw) {
    ModelShape model = Llama(8, 8, DType::kBf16);
    model.vocab = 1;
    if (draw % 2 == 0) {
      SetWindow(model, Draw<int64_t>(random, 1, 3000), Draw(random, 1, model.layers));
    }
    const int64_t cached = Draw<int64_t>(random, 0, 5000), tokens = Draw<int64_t>(random, 1, 5000);
    const auto compute = [&](int64_t cached_tokens, int64_t new_tokens) {
      return MakePlan(model, speed, {.tokens = new_tokens, .cached_tokens = cached_tokens})
          ->plan.predicted.compute_seconds;
    };
    const double before = cached == 0 ? 0 : compute(0, cached);
    EXPECT_NEAR(compute(cached, tokens) + before, compute(0, cached + tokens),
                1e-6 * compute(0, cached + tokens));
  }
}

// Few new queries after a long prefix: they go round instead of the keys.
TEST(MakePlan, ALongPrefixTurnsTheRingIntoPassQ) {
  const ModelShape model = Llama(8, 8, DType::kBf16);
  const PlanRequest request{.tokens = 1024, .ranks = 16, .heads = 1};
  PlanRequest after_prefix = request;
  after_prefix.cached_tokens = 1 << 20;
  EXPECT_EQ(MakePlan(model, kSlowLink, request)->plan.tile, (Tile{4, 4}));
  EXPECT_EQ(MakePlan(model, kSlowLink, after_prefix)->plan.tile, (Tile{16, 1}));
}

TEST(MakePlan, TakesNoLongerThanGreedyAndGreedyWhereAsked) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int faster = 0;
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i);
    const ModelShape model = Llama(8, 1 << Draw(random, 0, 3), DType::kBf16);
    const PoolSpeed speed = {.gemm_flops_per_second = 1e12,
                             .attention_flops_per_second = 1e12,
                             .link_bytes_per_second = std::exp2(Draw(random, 26, 36))};
    PlanRequest request = {.tokens = Draw<int64_t>(random, 4096, 100000), .ranks = Draw(random, 1, 64)};
    const auto choice = MakePlan(model, speed, request);
    request.schedule = ScheduleChoice::kGreedy;
    const auto greedy = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok() && greedy.ok()) << choice.status() << greedy.status();
    const Tile tile = greedy->plan.tile;
    const PlanShape shape = {.layout = greedy->plan.layout,
                             .heads = greedy->plan.heads,
                             .tile = tile,
                             .links = Links::Alike(speed.link())};
    ASSERT_EQ(greedy->plan.schedule, GreedySchedule(tile, OverlapCostsOf(model, speed, shape)));
    ASSERT_LE(choice->plan.predicted.seconds, greedy->plan.predicted.seconds);
    faster += choice->plan.predicted.seconds < greedy->plan.predicted.seconds ? 1 : 0;
  }
  EXPECT_GT(faster, 0);
}

TEST(MakePlan, TakesTheCallersTile) {
  const auto choice = MakePlan(Llama(8, 1, DType::kBf16), kSlowLink,
                               {.tokens = 4096, .ranks = 12, .tile = Tile{.a = 12, .b = 1}, .heads = 1});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.tile, (Tile{.a = 12, .b = 1}));
  EXPECT_EQ(choice->candidates.size(), 1u);
}

TEST(MakePlan, RefusesBadRequests) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t cached : {int64_t{-1}, int64_t{1} << 31, kMost}) {
    EXPECT_EQ(MakePlan(Llama(8, 8, DType::kBf16), {}, {.tokens = 9, .cached_tokens = cached}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  const ModelShape model = Llama(8, 2, DType::kF32);
  const auto refusal = [&](PlanRequest request) { return MakePlan(model, {}, request).status(); };
  const auto expect_invalid = [&](const PlanRequest& request, const std::string& what) {
    const absl::Status status = refusal(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Mentions(status, what)) << status;
  };
  expect_invalid({.tokens = 0, .ranks = 4}, "0 tokens");
  expect_invalid({.tokens = 8, .ranks = 0}, "0 ranks");
  expect_invalid({.tokens = 8, .ranks = 4, .stripe = 0}, "stripe");
  expect_invalid({.tokens = 8, .ranks = 4, .tile = Tile{.a = 2, .b = 3}}, "2x3");
  expect_invalid({.tokens = 8, .ranks = 4, .tile = Tile{.a = -2, .b = -2}}, "-2x-2");
  expect_invalid({.tokens = 8, .ranks = 4, .tile = Tile{.a = 1 << 16, .b = (1 << 16) + 4}}, "65536");
  expect_invalid({.tokens = 8, .ranks = 4, .tile = Tile{.a = 2, .b = 2}, .heads = 2},
                 "2x2 with 2 head groups");
  expect_invalid({.tokens = 8, .ranks = 4, .heads = 0}, "1, 2, 4");
  expect_invalid({.tokens = 8, .ranks = 4, .heads = 3}, "1, 2, 4");
  expect_invalid({.tokens = 8, .ranks = 16, .heads = 16}, "8 query heads and 2 KV heads");
  expect_invalid({.tokens = 8, .ranks = 4, .partial_dtype = DType::kF16}, "f16");
  expect_invalid({.tokens = 8, .ranks = 4, .memory_budget_bytes = -1}, "-1");
  EXPECT_TRUE(refusal({.tokens = 8, .ranks = 4}).ok());
  EXPECT_FALSE(MakePlan(model, {.link_bytes_per_second = 0}, {.tokens = 8}).ok());
  EXPECT_FALSE(MakePlan(ModelShape{}, {}, {.tokens = 8}).ok());
  EXPECT_TRUE(
      Mentions(MakePlan(Llama(6, 4, DType::kF32), {}, {.tokens = 8}).status(), "6 query heads, 4 KV heads"));
  for (const auto& [cached, tokens, fits] :
       {std::tuple<int64_t, int64_t, bool>{(int64_t{1} << 31) - 10, 9, true},
        {(int64_t{1} << 31) - 9, 9, false},
        {kMost, kMost, false},
        {1, kMost, false}}) {
    EXPECT_EQ(refusal({.tokens = tokens, .cached_tokens = cached}).ok(), fits) << cached;
  }
}

}  // namespace
}  // namespace meshfill
